"""The objects that a training keeps do not grow with its steps."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsurg as gs
from gradsurg.experiment.logged_numbers import RunLog
from gradsurg.experiment.loop import Step
from gradsurg.experiment.run_directory import RunDirectory
from tests.nets import batch, sgd, small
from tests.runs import a_run


def size_of(thing: Any, seen: set[int]) -> int:
    """Count the elements of all containers that objects of gradsurg hold, each object once."""
    if isinstance(thing, str | int | float | type | torch.Tensor):
        return 1
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    match thing:
        case dict():
            return 1 + sum(size_of(value, seen) for value in [*thing, *thing.values()])
        case list() | tuple() | set() | deque():
            return 1 + sum(size_of(value, seen) for value in thing)
        case _ if type(thing).__module__.startswith("gradsurg"):
            slots = [
                name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            held = [getattr(thing, name, None) for name in slots if name != "__weakref__"]
            return 1 + sum(size_of(value, seen) for value in [*held, getattr(thing, "__dict__", 0)])
        case _:
            return 1


@pytest.fixture(autouse=True)
def _low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("effects.effects.MAX_PAIRS", "multitask.conflict.MAX_UNFETCHED"):
        monkeypatch.setattr(f"gradsurg.{name}", 40)
    for name in ("MAX_TIMES", "MAX_PENDING_LOSSES"):
        monkeypatch.setattr(f"gradsurg.experiment.logged_numbers.{name}", 40)
    monkeypatch.setattr("gradsurg.multitask.conflict.BATCH", 10)
    # One tensor of 41 stays, and 40 more fill the list again: a period as long as the others.
    monkeypatch.setattr("gradsurg.per_example.gradients.MAX_UNFETCHED", 41)


@pytest.mark.parametrize(
    "intervention",
    [
        gs.Intervention(gs.Chain(gs.Clip(0.01), gs.GrokfastEMA()), when=gs.Every(2)),
        gs.Intervention(gs.Clip(0.01), gs.Nodes("*"), when=gs.Threshold(1e-9)),
        gs.Intervention(gs.PerSample(gs.Clip(0.01))),
        gs.Intervention(gs.PCGrad(), gs.SharedParameters()),
    ],
    ids=["effects", "nodes", "examples", "conflicts"],
)
def test_an_attached_surgery_whose_numbers_nobody_reads_stays_as_large(
    intervention: gs.Intervention,
) -> None:
    model = small()
    optimizer = sgd(model, 1e-3)
    sizes = []
    with gs.Surgery(intervention).attach(model, optimizer) as live:
        for step in range(1, 241):
            optimizer.zero_grad()
            x, y = batch(step)
            losses = [torch.nn.functional.cross_entropy(model(x), y), model(x).square().mean()]
            if live.labels[0] == ("pcgrad",):
                live.backward(losses)
            else:
                losses[0].backward()
            optimizer.step()
            if step in (80, 240):
                sizes.append(size_of(live, set()))
    assert sizes[0] == sizes[1] > 100


def test_the_log_of_a_run_stays_as_large(tmp_path: Path) -> None:
    log = RunLog(a_run(), RunDirectory(tmp_path), [])
    sizes = []
    for done in range(1, 241):
        log.add_step(Step(done, torch.tensor(1.0), 0.5))
        if done in (80, 240):
            sizes.append(size_of(log, set()))
    assert sizes[0] == sizes[1] > 40
    assert log.trained_s == 120
