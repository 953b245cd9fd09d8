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
from tests.runs import SHORT, Wrapped, a_run, assert_resumes, assert_same, data, kept_in, lines

FOLDER = Path(__file__).parents[2] / "conf" / "schedule"
CONFIGS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.yaml"))
}
STEPS = 500


def optimizer(lr: float = 0.1) -> Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def rates(config: dict[str, Any], steps: int = STEPS) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    schedule = schedule_maker(config, steps)(owner := optimizer())
    lr_values = [owner.param_groups[0]["lr"]]
    for _ in range(steps):
        owner.step()
        if schedule is not None:
            schedule.step()
        lr_values.append(owner.param_groups[0]["lr"])
    return lr_values


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_one_of_pytorchs_or_constant(name: str) -> None:
    schedule = schedule_maker(CONFIGS[name], STEPS)(optimizer())
    if name == "constant":
        assert schedule is None
    else:
        assert type(schedule).__name__ == CONFIGS[name]["name"]
    check_learning_rates(schedule, STEPS)


def test_nothing_moves_a_constant_learning_rate() -> None:
    assert set(rates(CONFIGS["constant"], 20)) == {0.1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear_warmup", {0: 0.001, 25: 0.0505, 50: 0.1, 500: 0.1}),
        ("linear_decay", {0: 0.1, 250: 0.05, 500: 0.0}),
        ("polynomial", {0: 0.1, 250: 0.025, 500: 0.0}),
        ("cosine", {0: 0.1, 250: 0.05, 500: 0.0}),
        ("cosine_restarts", {0: 0.1, 50: 0.05, 100: 0.1, 150: 0.05}),
        ("step", {0: 0.1, 199: 0.1, 200: 0.01, 400: 0.001}),
        ("multi_step", {249: 0.1, 250: 0.01, 375: 0.001}),
        ("exponential", {0: 0.1, 2: 0.1 * 0.995**2}),
        ("one_cycle", {0: 0.004, 149: 0.1, 499: 4e-7}),
        ("cyclic", {0: 0.001, 50: 0.1, 100: 0.001}),
        ("warmup_cosine", {0: 0.001, 50: 0.1, 275: 0.05, 500: 0.0}),
        ("warmup_stable_decay", {0: 0.001, 50: 0.1, 400: 0.1, 450: 0.05, 500: 0.0}),
    ],
)
def test_units_are_optimizer_steps_and_null_is_to_the_end(
    name: str, expected: dict[int, float]
) -> None:
    lr_values = rates(CONFIGS[name])
    assert {step: lr_values[step] for step in expected} == pytest.approx(expected, abs=1e-9)


def test_a_chain_of_schedules_multiplies() -> None:
    parts = [{"name": "LinearLR", "total_iters": None}, {"name": "ExponentialLR", "gamma": 0.5}]
    lr_values = rates({"name": "ChainedScheduler", "schedulers": parts}, 2)
    assert lr_values == pytest.approx([0.1 / 3, 0.1 * 2 / 3 / 2, 0.1 / 4])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "StepLR"}, "StepLR() is refused: .*step_size"),
        ({"name": "StpLR"}, "there is no 'StpLR' in .*Did you mean 'StepLR'?"),
        ({"name": "LambdaLR"}, "LambdaLR takes functions"),
        ({"name": "ReduceLROnPlateau"}, "ReduceLROnPlateau looks at a metric"),
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
    with pytest.raises((ValueError, LookupError), match=message.replace("()", r"\(\)")):
        check_learning_rates(schedule_maker(config, 20)(optimizer()), 20)


def test_a_trained_model_is_that_of_a_plain_loop() -> None:
    plain, model = small(), small()
    by_hand = sgd(plain)
    schedule = lr_scheduler.CosineAnnealingLR(by_hand, T_max=7)
    batches = data()
    for _, (inputs, targets) in zip(range(7), batches.start(0), strict=False):
        by_hand.zero_grad()
        torch.nn.functional.cross_entropy(plain(inputs), targets).backward()
        by_hand.step()
        schedule.step()
    optimizer = sgd(model)
    options = StepOptions(schedule=schedule_maker(CONFIGS["cosine"], 7)(optimizer))
    for _ in train(
        model, optimizer, torch.nn.functional.cross_entropy, batches, 7, options=options
    ):
        pass
    assert all(map(torch.equal, weights(plain), weights(model)))


def scheduled(name: str, at: int = 0) -> Run:
    config = CONFIGS[name] | ({"milestones": [7]} if name == "warmup_cosine" else {})
    config |= {"milestones": [7, 20]} if name in ("multi_step", "warmup_stable_decay") else {}
    run = a_run(gs.Clip(0.05), task=Wrapped(at, "raise"))
    return replace(run, make_lr_schedule=schedule_maker(config, SHORT.steps))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "constant"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    whole = assert_resumes(lambda at: scheduled(name, at), tmp_path, 15)
    assert kept_in(whole.directory)["lr_schedule"]["last_epoch"] == SHORT.steps


def test_a_constant_schedule_is_none_at_all(tmp_path: Path) -> None:
    one = execute(scheduled("constant"), tmp_path / "one", [])
    other = execute(a_run(gs.Clip(0.05)), tmp_path / "other", [])
    cosine = execute(scheduled("cosine"), tmp_path / "cosine", [])
    assert_same(one, other)
    assert lines(cosine, "metrics.jsonl") != lines(one, "metrics.jsonl")
