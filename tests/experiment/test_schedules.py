"""Schedules of the learning rate: what a config makes, and that runs with one resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim import Optimizer, lr_scheduler

import gradsurg as gs
from gradsurg.experiment.execution import execute
from gradsurg.experiment.loop import StepOptions, train
from gradsurg.experiment.run import Run
from gradsurg.experiment.schedules import check_learning_rates, schedule_maker
from tests.nets import sgd, small, weights
from tests.runs import SHORT, Wrapped, a_run, assert_resumes, assert_same, data, kept_in

FOLDER = Path(__file__).parents[2] / "conf" / "schedule"
CONFIGS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FOLDER.glob("*.yaml")}
EXPECTED = {
    "constant": {0: 0.1, 500: 0.1},
    "linear_warmup": {0: 0.001, 25: 0.0505, 50: 0.1, 500: 0.1},
    "linear_decay": {0: 0.1, 250: 0.05, 500: 0.0},
    "polynomial": {0: 0.1, 250: 0.025, 500: 0.0},
    "cosine": {0: 0.1, 250: 0.05, 500: 0.0},
    "cosine_restarts": {0: 0.1, 50: 0.05, 100: 0.1, 150: 0.05},
    "step": {0: 0.1, 199: 0.1, 200: 0.01, 400: 0.001},
    "multi_step": {249: 0.1, 250: 0.01, 375: 0.001},
    "exponential": {0: 0.1, 2: 0.1 * 0.995**2},
    "one_cycle": {0: 0.004, 149: 0.1, 499: 4e-7},
    "cyclic": {0: 0.001, 50: 0.1, 100: 0.001},
    "warmup_cosine": {0: 0.001, 50: 0.1, 275: 0.05, 500: 0.0},
    "warmup_stable_decay": {0: 0.001, 50: 0.1, 400: 0.1, 450: 0.05, 500: 0.0},
}
"""The learning rate at some steps of 500, of an optimizer with 0.1."""


def optimizer() -> Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def rates(config: dict[str, Any], steps: int) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    schedule = schedule_maker(config, steps)(owner := optimizer())
    lr_values = [owner.param_groups[0]["lr"]]
    for _ in range(steps):
        owner.step()
        if schedule is not None:
            schedule.step()
        lr_values.append(owner.param_groups[0]["lr"])
    return lr_values


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_units_are_optimizer_steps_and_null_is_to_the_end(name: str) -> None:
    lr_values = rates(CONFIGS[name], 500)
    found = {step: lr_values[step] for step in EXPECTED[name]}
    assert found == pytest.approx(EXPECTED[name], abs=1e-9)
    schedule = schedule_maker(CONFIGS[name], 500)(optimizer())
    assert (schedule is None) == (name == "constant")
    check_learning_rates(schedule, 500)


def test_a_chain_of_schedules_multiplies() -> None:
    parts = [{"name": "LinearLR", "total_iters": None}, {"name": "ExponentialLR", "gamma": 0.5}]
    lr_values = rates({"name": "ChainedScheduler", "schedulers": parts}, 2)
    assert lr_values == pytest.approx([0.1 / 3, 0.1 * 2 / 3 / 2, 0.1 / 4])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "StepLR"}, r"StepLR\(\) is refused: .*step_size"),
        ({"name": "StpLR"}, "there is no 'StpLR' in .*Did you mean 'StepLR'?"),
        ({"name": "LambdaLR"}, "LambdaLR takes functions"),
        ({"name": "ReduceLROnPlateau"}, "ReduceLROnPlateau looks at a metric"),
        ({"name": "constant", "gamma": 1}, "gamma: is not a field here: constant has none"),
        ({"name": "StepLR", "step_size": 0}, "fails at step 1: "),
        ({"name": "ExponentialLR", "gamma": -1.0}, "gives the learning rate -0.1 at step 1"),
        ({"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 9}, "fails at step 10: "),
        (CONFIGS["warmup_cosine"] | {"milestones": [20]}, "milestones: must be 1 rising"),
        (CONFIGS["warmup_cosine"] | {"milestones": "x"}, "milestones: must be 1 rising"),
        (CONFIGS["warmup_cosine"] | {"schedulers": 3}, "schedulers: must be a list of mappings"),
    ],
)
def test_a_schedule_that_would_fail_in_a_run_is_refused_before(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        check_learning_rates(schedule_maker(config, 20)(optimizer()), 20)


def test_a_trained_model_is_that_of_a_plain_loop() -> None:
    plain, model, batches = small(), small(), data()
    by_hand, optimizer = sgd(plain), sgd(model)
    schedule = lr_scheduler.CosineAnnealingLR(by_hand, T_max=7)
    loss_fn = torch.nn.functional.cross_entropy
    for _, (inputs, targets) in zip(range(7), batches.start(0), strict=False):
        by_hand.zero_grad()
        loss_fn(plain(inputs), targets).backward()
        by_hand.step()
        schedule.step()
    options = StepOptions(schedule=schedule_maker(CONFIGS["cosine"], 7)(optimizer))
    assert len([*train(model, optimizer, loss_fn, batches, 7, options=options)]) == 7
    assert all(map(torch.equal, weights(plain), weights(model)))


def scheduled(name: str, at: int = 0) -> Run:
    marks = {"warmup_cosine": [7], "multi_step": [7, 20], "warmup_stable_decay": [7, 20]}
    config = CONFIGS[name] | ({"milestones": marks[name]} if name in marks else {})
    run = a_run(gs.Clip(0.05), task=Wrapped(at, "raise"))
    return replace(run, make_lr_schedule=schedule_maker(config, SHORT.steps))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    whole = assert_resumes(lambda at: scheduled(name, at), tmp_path, 15)
    if name == "constant":
        assert_same(whole, execute(a_run(gs.Clip(0.05)), tmp_path / "other", []))
    else:
        assert kept_in(whole.directory)["lr_schedule"]["last_epoch"] == SHORT.steps
