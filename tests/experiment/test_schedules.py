"""Schedules of the learning rate: what a config makes, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim import Optimizer

from gradsurg.experiment.optimization import check_learning_rates, make_schedule

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
    schedule = make_schedule(config, steps, owner := optimizer())
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
    schedule = make_schedule(CONFIGS[name], 500, optimizer())
    assert (schedule is None) == (name == "constant")
    check_learning_rates(schedule, 500)


def torchs(name: str, **fields: Any) -> dict[str, Any]:  # Any: fields have many types
    return {"_target_": f"torch.optim.lr_scheduler.{name}", **fields}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (torchs("StepLR"), r"StepLR\(\) is refused: .*step_size"),
        (torchs("StpLR"), "did you mean 'StepLR'. There is no 'StpLR' in torch.optim"),
        (torchs("LambdaLR"), "LambdaLR takes functions"),
        (torchs("ReduceLROnPlateau"), "ReduceLROnPlateau looks at a metric"),
        (torchs("SequentialLR"), "SequentialLR takes schedules that are made already"),
        ({"gamma": 1}, "needs a _target_"),
        (torchs("StepLR", step_size=0), "fails at step 1: "),
        (torchs("ExponentialLR", gamma=-1.0), "gives the learning rate -0.1 at step 1"),
        (torchs("OneCycleLR", max_lr=0.1, total_steps=9), "fails at step 10: "),
        (CONFIGS["warmup_cosine"] | {"milestones": [20]}, "milestones: must be 1 rising"),
        (CONFIGS["warmup_cosine"] | {"milestones": "x"}, "milestones: must be 1 rising"),
        (CONFIGS["warmup_cosine"] | {"schedulers": 3}, "schedulers: must be a list of mappings"),
    ],
)
def test_a_schedule_that_would_fail_in_a_run_is_refused_before(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, ImportError), match=message):
        check_learning_rates(make_schedule(config, 20, optimizer()), 20)
