"""Weights: parameter values are edited in place, at the right moment, where they change."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import attached, sgd, small, train
from tests.sites.points import Acts, Noted, UserGroup, calls_of


def _one(value: float = 1.0) -> nn.Linear:
    """One weight of 2, w = `value`: the gradient of w x at x = 3 is 3."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "no stale cast"])
def test_at_stage_forward_they_are_edited_before_each_call_in_training_mode(autocast: bool) -> None:
    model = _one(8.0)
    with (
        attached(model, gs.Scale(0.5), gs.Weights(stage="forward")) as live,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        assert model(torch.ones(1, 2)).item() == 8.0
        assert model(torch.ones(1, 2)).item() == 4.0
        model.eval()
        assert model(torch.ones(1, 2)).item() == 4.0
    assert calls_of(live) == {"weight": 2}


def test_a_no_op_writes_to_nothing() -> None:
    plain, model = small(), small()
    train(plain, sgd(plain), 5)
    optimizer = sgd(model)
    with (
        attached(model, gs.Identity(), gs.Weights(), optimizer),
        attached(model, gs.Identity(), gs.Weights(stage="forward"), optimizer),
        attached(model, gs.Scale(3.0), gs.Weights(), optimizer, shadow=True),
        attached(model, UserGroup(lambda weights, _: weights), gs.Weights(), optimizer),
    ):
        train(model, optimizer, 5)
        versions = [param._version for param in model.parameters()]
    assert versions == [param._version for param in plain.parameters()]


def test_a_result_that_is_a_view_of_the_weight_is_copied_correctly() -> None:
    model = nn.Linear(64, 64, bias=False)
    expected = model.weight.detach().t().clone()
    with attached(model, Acts(Tensor.t), gs.Weights(stage="forward")):
        model(torch.ones(1, 64))
    assert torch.equal(model.weight, expected)


def test_the_step_number_is_that_of_the_last_step() -> None:
    model = small()
    optimizer = sgd(model)
    after, before, added = Noted(), Noted(), Noted()
    with (
        attached(model, after, gs.Weights("first.bias"), optimizer) as live,
        attached(model, before, gs.Parameters("first.bias", stage="step"), optimizer),
    ):
        live.add(gs.Intervention(added, gs.Weights("first.bias")))
        train(model, optimizer, 3)
        assert live.step == 3
    assert after.steps == before.steps == added.steps == [0, 1, 2]
