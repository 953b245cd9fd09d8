"""The wrapper around every transform: what passes, what is refused, and with which words."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import (
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
)
from tests.nets import attached, backward, gradients, sgd, train, trainee
from tests.sites.points import Made


class Later(Stateless):
    """Writes to the gradient from the third step on."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad.mul_(2.0) if context.step >= 2 else grad


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda later: gs.Chain(gs.Clip(), later),
        gs.Scheduled,
        lambda later: gs.NormMatched(gs.Chain(later, gs.Clip())),
    ],
)
def test_a_wrapper_of_a_users_transform_is_checked_like_it(wrapped: Any) -> None:
    model, optimizer = trainee()
    at, in_place = gs.Parameters("first.weight"), pytest.raises(RuntimeError, match="in place")
    with in_place, attached(model, wrapped(Later()), at, optimizer):
        train(model, optimizer, 3)


# None


@pytest.mark.parametrize("transform", [gs.Scale(2.0), gs.ClipGlobalNorm(1e-3)], ids=repr)
def test_a_parameter_without_a_gradient_stays_without_at_stage_step(transform) -> None:
    model = Made(lambda self, x: self.used(x), used=nn.Linear(6, 4), unused=nn.Linear(6, 4))
    optimizer = sgd(model)
    with (
        pytest.warns(gs.SurgeryWarning, match=r"unused\.weight, unused\.bias$"),
        attached(model, transform, gs.Parameters(stage="step"), optimizer),
    ):
        model(torch.ones(2, 6)).sum().backward()
        before = gradients(model)
        optimizer.step()
    assert model.unused.weight.grad is None
    assert set(gradients(model)) == {"used.weight", "used.bias"}
    assert not torch.equal(gradients(model)["used.bias"], before["used.bias"])


def test_a_step_without_any_gradient_passes() -> None:
    model, optimizer = trainee()
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"),
        attached(model, gs.ClipGlobalNorm(), None, optimizer),
    ):
        optimizer.step()
    assert not gradients(model)


class Product(Stateless):
    """Multiplies matrices, which autocast would do in half precision, and notes where."""

    def __init__(self) -> None:
        self.autocast: list[bool] = []

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return grad @ torch.eye(grad.shape[1], dtype=grad.dtype)


@pytest.mark.parametrize("stage", ["backward", "accumulated", "step"])
def test_autocast_is_off_inside_a_transform(stage) -> None:
    (model, optimizer), product = trainee(), Product()
    with (
        attached(model, product, gs.Parameters("*.weight", stage=stage), optimizer),
        torch.autocast("cpu", torch.bfloat16),
    ):
        for _ in range(3):
            train(model, optimizer, 1)
            assert torch.is_autocast_enabled("cpu")
    assert product.autocast == [False] * 6


def test_autocast_is_off_inside_a_transform_though_a_call_of_the_same_step_was_outside_it() -> None:
    (model, optimizer), product = trainee(), Product()
    with attached(model, product, gs.Activations("first"), optimizer, effects_every=0):
        for _ in range(2):
            backward(model)
            with torch.autocast("cpu", torch.bfloat16):
                backward(model)
            optimizer.step()
    assert product.autocast == [False] * 4


class GlobalDraws(gs.Trigger):
    """A user's trigger that draws from the global generator."""

    def fires(self, context: Any) -> bool:
        return bool(torch.rand(()) < 2)


def _numpy_noise(grad: Tensor) -> Tensor:
    return grad + float(np.random.standard_normal())


@pytest.mark.parametrize(
    ("transform", "when", "message"),
    [
        (lambda grad: grad + torch.randn_like(grad), gs.Always(), "context.generator"),
        (_numpy_noise, gs.Always(), "context.generator"),
        (gs.Chain(gs.Clip(1.0), nn.Dropout(0.5)), gs.Always(), "context.generator"),
        (gs.Clip(1.0), GlobalDraws(), "seeded by context.seed"),
    ],
    ids=["torch", "numpy", "a link", "a trigger"],
)
def test_user_code_that_draws_from_a_global_generator_is_refused_with_the_way_out(
    transform: Transform, when: gs.Trigger, message: str
) -> None:
    model, optimizer = trainee()
    with (
        pytest.raises(RuntimeError, match=f"drew from a global random generator.*{message}"),
        attached(model, transform, None, optimizer, when),
    ):
        backward(model)
