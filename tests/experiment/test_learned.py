"""Runs that have learned nothing are recognized and reported."""

from dataclasses import dataclass
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.experiment.execution import execute
from gradsurg.experiment.logged_numbers import learned_nothing
from gradsurg.report.cautions import cautions
from gradsurg.report.compare import compare
from gradsurg.report.study import read_study
from gradsurg.tasks.base import Classification, Data, Regression
from gradsurg.tasks.digits import Digits
from tests.report import studies
from tests.runs import Wrapped, a_run


@dataclass(frozen=True)
class Classes(Classification):
    def load(self) -> Data:
        raise NotImplementedError


@dataclass(frozen=True)
class Numbers(Regression):
    def load(self) -> Data:
        raise NotImplementedError


@dataclass(frozen=True)
class Unjudged(Wrapped):
    def chance(self, targets: Tensor) -> None:
        return None


def data(targets: Tensor) -> Data:
    inputs = torch.zeros(len(targets), 1)
    return Data(inputs, targets, inputs, targets, (1,), 4)


UNEVEN = torch.tensor([0, 0, 0, 1, 2, 2])


def test_chance_is_the_best_constant_guess() -> None:
    """By trying every class, and every share of them that a softmax can give."""
    for targets in (UNEVEN, UNEVEN.view(2, 3)):
        constant = Classes().chance(targets)
        best = max((targets == label).double().mean().item() for label in range(3))
        assert constant.value == best == 0.5
        logits = torch.tensor([3 / 6, 1 / 6, 2 / 6]).log().expand(*targets.shape, 3)
        assert constant.loss == pytest.approx(Classes().loss(logits, targets).item())
        assert constant.description == "chance for 3 classes is"
    targets = torch.tensor([1.0, 2.0, 6.0])
    constant, guess = Numbers().chance(targets), torch.full((3,), 3.0)
    assert constant.loss == pytest.approx(Numbers().loss(guess, targets).item())
    metrics = Numbers().metrics(guess, targets)
    assert (constant.metric, constant.value) == ("r2", pytest.approx(metrics["r2"], abs=1e-6))


GUESS = {"metric": "test/accuracy", "beside": 0.5, "what": "chance for 3 classes is"}
FLAT = {
    "metric": "train/loss",
    "beside": 2.0,
    "what": "the first one that was logged, at step 5, was",
}


@pytest.mark.parametrize(
    ("numbers", "dead"),
    [
        ((1.02, 0.5, 0.5), True),
        ((1.011, 0.54, 0.3), True),
        ((0.9, 0.5, 0.5), False),  # it knows more than the shares of the classes
        ((1.02, 0.9, 0.5), False),  # learnt by heart
        ((1.02, 0.5, 0.9), False),
        ((9.0,), False),  # without metrics it is not judged
    ],
)
def test_a_run_no_better_than_chance_in_any_metric_has_learned_nothing(
    numbers: tuple[float, ...], dead: bool
) -> None:
    last = dict(zip(("train/loss", "train/accuracy", "test/accuracy"), numbers, strict=False))
    assert learned_nothing(Classes(), data(UNEVEN), last, []) == (GUESS if dead else {})


@pytest.mark.parametrize(
    ("losses", "dead"),
    [
        ((2.0, 2.0, 2.5, 2.0), True),
        ((2.0, 1.9, 2.5, 2.0), False),
        ((2.0, 2.1, 1.9), False),
        ((2.0, 2.0), False),
        ((2.0, None, 2.0, 2.0), False),
    ],
)
def test_a_task_without_a_chance_level_is_judged_by_its_losses(losses, dead: bool) -> None:
    *rows, last = [{"step": 5 * k, "train/loss": loss} for k, loss in enumerate(losses, 1)]
    assert learned_nothing(Unjudged(), data(UNEVEN), last, rows) == (FLAT if dead else {})


@pytest.mark.parametrize(("transform", "dead"), [(gs.Zero(), True), (gs.Identity(), False)])
def test_the_summary_records_that_a_run_has_learned_nothing(
    tmp_path: Path, transform: gs.Identity, dead: bool
) -> None:
    record = execute(a_run(transform, task=Digits()), tmp_path, [])
    assert bool(record.summary["learned_nothing"]) == dead
    assert record.summary["chance_loss"] == pytest.approx(log(10), abs=0.01)


DEAD = {"metric": "test/accuracy", "beside": 0.1, "what": "chance for 10 classes is"}


def told(folder: Path) -> list[str]:
    study = read_study(folder)
    return [line for line in cautions(study, compare(study)) if "did not learn" in line]


def test_diverged_and_older_runs_are_not_reported_as_unlearned(tmp_path: Path) -> None:
    diverged, older = (studies.plan(tmp_path, "clip", seed) for seed in range(2))
    studies.end(diverged, "clip", 0.1, "diverged", learned_nothing=DEAD)
    studies.end(older, "clip", 0.1)
    assert told(tmp_path) == []
