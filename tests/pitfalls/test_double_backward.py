"""Pitfall 33: double backward through every transform."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.plugins.registry import find, names
from gradsurg.testing.transforms import context_with
from gradsurg.transforms.base import Transform

TRANSFORMS: list[Transform] = [
    # What lrp returns is a constant in a double backward, and no hook gives it a module.
    *(find("transforms", stem)() for stem in names("transforms") if stem not in ("chain", "lrp")),
    gs.Chain(gs.ClipNorm(0.5), gs.GrokfastEMA()),
    gs.Clip(1.0),
    gs.ClipNorm(0.5, per="unit"),
    gs.Mask(0.5, by="random", rescale=True),
    gs.NormRescale(per="unit"),
    gs.ScaleBySign(2.0, 0.5, of="value"),
    gs.Scheduled(gs.NormRescale(), start=0.5),
    gs.Sign("mean"),
]


def gradient(x: Tensor, transform: Transform, *, hooked: bool) -> Tensor:
    """Return d/dx of sum(h^3), h = x^3, with the gradient at h transformed, with its graph.

    The hook is removed before the second backward pass.
    """
    h = x**3
    if hooked:
        handle = gs.hook(h, transform)
    else:  # a transform of a group has no hook, and a random one is to draw the same each time
        beside = context_with(torch.ones_like(h))  # what else is asked for: constants
        context = replace(beside, site="h", value=h.detach())
        handle = h.register_hook(lambda g: transform.update(g, transform.init(g), context)[0])
    with handle:
        (grad,) = torch.autograd.grad((h**3).sum(), x, create_graph=True)
    return grad if grad.requires_grad else grad + 0 * x


def is_right(transform: Transform, *, hooked: bool) -> bool:
    """Return whether the second derivative agrees with finite differences of the first."""
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.autograd.gradcheck(
        lambda x: gradient(x, transform, hooked=hooked),
        (x.requires_grad_(),),
        raise_exception=False,
        atol=1e-3,
    )


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_p33_double_backward_differentiates_the_transform(
    transform: Transform,
) -> None:
    hooked = transform.scope == "tensor" and "deterministic" in transform.properties
    hooked = hooked and not transform.needs & {"entering", "gradient", "labels"}
    # What depends on the value, or on rows of examples, takes them for constants, and says so.
    of_value = (gs.AGC, gs.AddDecayed, gs.PerSample, gs.Perpendicular, gs.TrustRatio)
    assert is_right(transform, hooked=hooked) != isinstance(transform, of_value)


def test_p33_the_value_is_a_constant_in_a_double_backward() -> None:
    # Clipped to 0.01 |w|: the derivative by x of the clipped gradient is that at a fixed w.
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    w = 3 * x
    with gs.hook(w, gs.AGC(clipping=0.5, per="tensor")):
        (grad,) = torch.autograd.grad((w**2).sum(), x, create_graph=True)
    assert grad.item() == pytest.approx(0.5 * 6 * 3)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.item() == pytest.approx(0.0)
