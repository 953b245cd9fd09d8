"""Inputs: the gradient of one branch or of all uses, by place and by keyword."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.torch_internals import module_hooks
from gradsurg.transforms.base import Transform
from tests.nets import attached, gradients, num_hooks
from tests.sites.points import (
    TEN,
    Double,
    InPlace,
    Made,
    grad_of,
    names_of_sites,
    passed,
    point,
    recomputed,
)

PATHS = ("branch", "total")


def _residual(inner: nn.Module) -> Made:
    """d/dh of `h + 2h` is 1 past the module and 2 through it."""

    def forward(self: Made, x: Tensor) -> Tensor:
        h = x * 1
        return h + self.f(h)

    return Made(forward, f=inner)


def _written_later(self: Made, x: Tensor) -> Tensor:
    h = x * 1
    h += self.f(h)
    return h


def _tripled(model: nn.Module) -> nn.Module:
    next(iter(model.children())).register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    return model


BY_VALUE = gs.ScaleBySign(positive=10.0, negative=0.0, of="value")
RECOMPUTED = Made(lambda self, x: recomputed(self.inner, x, True), inner=Double())
FORK = Made(lambda self, x: self.left(x) * 3 + self.right(x), left=Double(), right=Double())
PAIR = nn.Sequential(Double(), Double())


@pytest.mark.parametrize(
    ("model", "transform", "pattern", "path", "grad", "sites"),
    [
        (Made(_written_later, f=Double()), TEN, "f", "branch", [21, -21], [["f"]]),
        (nn.Sequential(Double(), InPlace()), TEN, "1", "total", [40, -40], [["1"]]),
        # A residual around a reentrant checkpoint is not in the total inside.
        (_residual(RECOMPUTED), TEN, "f.inner", "total", [21, -21], [["f.inner"]]),
        (PAIR, BY_VALUE, "1", "branch", [40, 0], [["1"]]),
        (PAIR, BY_VALUE, "1", "total", [40, 0], [["1"]]),
        # Modules that take the same tensor have separate branches, and share a total.
        (FORK, gs.Clip(5.0), "*", "branch", [5 + 2, -7], [["left"], ["right"]]),
        (FORK, gs.Clip(5.0), "*", "total", [5, -5], [["left", "right"]]),
        # Pre-hooks of others run first.
        (_tripled(nn.Sequential(Double())), gs.Clip(1.0), "0", "branch", [3, -3], [["0"]]),
    ],
)
def test_the_gradient_of_a_branch_or_of_all_uses_is_transformed(
    model: nn.Module,
    transform: Transform,
    pattern: str,
    path: Any,
    grad: list[int],
    sites: list[list[str]],
) -> None:
    x, sign = point(1.0, -1.0), torch.tensor([1.0, -1.0])
    with attached(model, transform, gs.Inputs(pattern, path=path)) as live:
        (model(x * 1) * (1.0 if transform is BY_VALUE else sign)).sum().backward()
    assert grad_of(x) == grad
    assert names_of_sites(live) == [[f"{name}#0.input" for name in names] for names in sites]


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_given_twice_is_one_site_with_both_names_and_one_tensor(path: Any) -> None:
    def sums(self: Made, a: Tensor, again: Tensor) -> Tensor:
        assert a is again  # as self-attention asks
        return 3 * a + 5 * again

    x = point()
    model = Made(lambda self, a: self.mix(a, again=a), mix=Made(sums))
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(x * 1).backward()
    assert grad_of(x) == [6.0]  # of 3 + 5
    assert names_of_sites(live) == [["mix#0.input.0", "mix#0.input.again"]]


def test_a_parameter_as_input_can_be_a_branch_or_a_total() -> None:
    grads = []
    for path in PATHS:
        model = Made(
            lambda self: (self.f(self.prompt) + self.prompt).sum(),
            prompt=nn.Parameter(torch.ones(1)),
            f=Double(),
        )
        with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path)):
            for _ in range(2):
                model.zero_grad()
                model().backward()
        grads.append(gradients(model)["prompt"].item())
        assert num_hooks(model) == 0
    assert grads == [21.0, 30.0]


@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("second", PATHS)
def test_two_interventions_on_one_input_act_in_order(first: Any, second: Any) -> None:
    # 2 clipped to 1, times 10; a branch comes before a total.
    model, x = nn.Sequential(Double()), point()
    clip = gs.Intervention(gs.Clip(1.0), gs.Inputs("0", path=first))
    scale = gs.Intervention(gs.Scale(10.0), gs.Inputs("0", path=second))
    noop = gs.Intervention(gs.Identity(), gs.Inputs("0"))
    with gs.Surgery(noop, clip, scale).attach(model):
        model(x * 1).sum().backward()
    assert grad_of(x) == [1.0 if (first, second) == ("total", "branch") else 10.0]


def test_all_hooks_on_one_leaf_are_removed() -> None:
    model, x = Made(lambda self, x: self.f(x) + self.g(x), f=Double(), g=Double()), point()
    items = [gs.Intervention(TEN, gs.Inputs(name, path="total")) for name in ("f", "g")]
    with gs.Surgery(*items).attach(model):
        model(x).backward()
        assert len(module_hooks.hooks_of(x)) == 2
    assert len(module_hooks.hooks_of(x)) == 0
    assert grad_of(x) == [400.0]


@pytest.mark.parametrize(
    ("model", "noop", "at", "transform", "grad"),
    [
        # A total includes all uses even if a container was given an alias.
        (_residual(nn.Sequential(Double())), "f", gs.Inputs("f.0", path="total"), "clip", 0.5),
        # The output of an identity is another site than its input.
        (nn.Sequential(Double(), nn.Identity()), "1", gs.Outputs(), "scale", 200.0),
    ],
)
def test_an_alias_of_another_intervention_stands_for_its_tensor(
    model: nn.Module, noop: str, at: Selector, transform: str, grad: float
) -> None:
    x, transforms = point(), {"clip": gs.Clip(0.5), "scale": TEN}
    first = gs.Intervention(gs.Identity(), gs.Inputs(noop))
    with gs.Surgery(first, gs.Intervention(transforms[transform], at)).attach(model):
        model(x).sum().backward()
    assert grad_of(x) == [grad]


def test_an_alias_keeps_the_strides_of_its_tensor() -> None:
    seen = []
    x = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    model = nn.Sequential(Made(lambda self, x: seen.append((x.stride(), x.data_ptr())) or x * 2))
    passed(model, gs.Identity(), gs.Inputs("0"), x)
    assert seen == [(x.stride(), x.data_ptr())]
    assert x.view_as(x).stride() != x.stride()
