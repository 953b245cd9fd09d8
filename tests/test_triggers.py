"""When a transform acts."""

import re

import pytest
import torch

import gradsurg as gs
from gradsurg.fields import FieldError
from gradsurg.sites.base import Selector
from gradsurg.triggers.base import Clock, Moment
from tests.nets import attached, backward, gradients, sgd, small


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (gs.Always(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Steps(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Steps(start=3), [3, 4, 5, 6, 7]),
        (gs.Steps(stop=2), [0, 1]),
        (gs.Steps(start=2, stop=5), [2, 3, 4]),
        (gs.Steps(every=3), [0, 3, 6]),
        (gs.Steps(start=1, every=3), [1, 4, 7]),
        (gs.Steps(start=1, stop=7, every=3), [1, 4]),
        (gs.Steps(start=1, stop=8, every=3), [1, 4, 7]),
        (gs.Steps(start=6, stop=7, every=5), [6]),
    ],
)
def test_a_trigger_fires_at_its_steps(trigger: gs.Trigger, steps: list[int]) -> None:
    assert [step for step in range(8) if trigger.fires(Moment(Clock(step)))] == steps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": -1}, "Steps.start: must be >= 0, found -1"),
        ({"stop": 0}, "Steps.stop: must be >= 1, found 0"),
        ({"every": 0}, "Steps.every: must be >= 1, found 0"),
        ({"start": 5, "stop": 5}, "Steps.stop: must be > start (5), found 5"),
        ({"start": 1.5}, "Steps.start: must be a whole number, found 1.5"),
        ({"strat": 5}, "Did you mean 'start'?"),
    ],
)
def test_steps_that_make_no_sense_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(FieldError, match=re.escape(message)):
        gs.Steps(**fields)


def test_a_trigger_is_a_value() -> None:
    assert gs.Steps(1, 5) == gs.Steps(start=1, stop=5)
    assert hash(gs.Steps(1)) == hash(gs.Steps(1))
    assert gs.Steps(1) != gs.Steps(2)


@pytest.mark.parametrize(
    "at",
    [
        gs.Parameters("first.*"),
        gs.Parameters("first.*", stage="accumulated"),
        gs.Parameters("first.*", stage="step"),
        gs.Outputs("first"),
        gs.Nodes("Relu"),
    ],
    ids=repr,
)
def test_steps_are_those_of_the_optimizer_at_every_site(at: Selector) -> None:
    model = small()
    optimizer = sgd(model)
    acted = []
    with attached(model, gs.Zero(), at, optimizer, gs.Steps(start=1, stop=4, every=2)):
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            if not gradients(model)["first.weight"].any():
                acted.append(step)
    assert acted == [1, 3]


def test_backward_passes_without_a_step_are_of_the_same_step() -> None:
    model = small()
    optimizer = sgd(model)
    acted = []
    with attached(model, gs.Zero(), None, optimizer, gs.Steps(stop=1)):
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            acted.append(not gradients(model)["last.bias"].any())
        optimizer.step()
        backward(model)
        acted.append(not gradients(model)["last.bias"].any())
    assert acted == [True, True, False]


def test_a_step_that_the_scaler_skips_is_not_counted() -> None:
    model = small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with attached(model, gs.Scale(2.0), gs.Parameters("last.*"), optimizer) as live:
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 6)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert live.step == 1
