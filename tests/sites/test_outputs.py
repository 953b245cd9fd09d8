"""Outputs: which tensors are hooked, under which name, and with which gradient."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform
from tests.contexts.kinds import README
from tests.nets import attached, gradients, num_hooks, sgd
from tests.sites.points import (
    TEN,
    Double,
    Made,
    calls_of,
    names_of_sites,
    passed,
    point,
    recomputed,
)


@pytest.mark.parametrize(("kind", "grad_output"), [("Outputs", 1.0), ("ModuleGradients", 0.0)])
def test_a_full_backward_hook_of_the_user_sees_the_documented_gradients(
    kind: str, grad_output: float
) -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []
    model[1].register_full_backward_hook(
        lambda module, inputs, outputs: seen.append((inputs, outputs))
    )
    with attached(model, gs.Zero(), getattr(gs, kind)("1")):
        model(torch.ones(3, 2)).sum().backward()
    (((entering,), (leaving,)),) = seen
    assert leaving.unique().tolist() == [grad_output]
    assert entering.unique().tolist() == [0.0]
    text = README.read_text(encoding="utf-8")
    assert "Your own `register_full_backward_hook` at a module that `Outputs` selects" in text


@pytest.mark.parametrize(
    ("model", "at", "sites"),
    [
        # Each tensor of a nested output, and a tensor that several modules return once.
        (nn.Sequential(nn.LSTM(3, 4)), gs.Outputs("0"), [["0#0.0"], ["0#0.1.0"], ["0#0.1.1"]]),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 3))), gs.Outputs(), [["0.0#0", "0#0"]]),
        # A list of modules is no site; a module that works in place is, even if it changes nothing.
        (
            Made(
                lambda self, x: self.layers[1](self.layers[0](x)),
                layers=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
            ),
            gs.Outputs(),
            [["layers.0#0"], ["layers.1#0"]],
        ),
        (
            nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5, inplace=True).eval()),
            gs.Outputs(),
            [["0#0"], ["1#0"]],
        ),
    ],
)
def test_the_tensors_that_modules_return_are_sites(
    model: nn.Module, at: gs.Outputs, sites: list[list[str]]
) -> None:
    model.zero_grad()
    with attached(model, gs.Zero(), at) as live:
        sum(tensor.sum() for tensor in tree_leaves(model(torch.ones(2, 1, 3)))).backward()
    assert names_of_sites(live) == sites
    assert not gradients(model)[next(iter(gradients(model)))].any()


HALF = gs.Outputs("lstm", item="1.*")


@pytest.mark.parametrize(
    ("at", "sites"),
    [
        (gs.Outputs(item="0"), ["lstm#0.0"]),
        (gs.Outputs("lstm", item=r"re:.*\.1"), ["lstm#0.1.1"]),
        (HALF | gs.Outputs("first"), ["first#0", "lstm#0.1.0", "lstm#0.1.1"]),
        (HALF | gs.Outputs("lstm", item="*.1"), ["lstm#0.1.0", "lstm#0.1.1"]),
        (HALF & gs.Outputs(item="*.1"), ["lstm#0.1.1"]),
        (gs.Outputs("lstm") & ~HALF, ["lstm#0.0"]),
        (HALF.first(1), ["lstm#0.1.0"]),
        (HALF.where(lambda place: place.site == "lstm#0.1.1"), ["lstm#0.1.1"]),
        (
            gs.Outputs("lstm", item="?*", call=0).expect(3),
            [f"lstm#0.{x}" for x in ("0", "1.0", "1.1")],
        ),
    ],
)
def test_items_of_an_output_are_selected_each_once(at: Selector, sites: list[str]) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), lstm=nn.LSTM(3, 4)))
    with attached(model, gs.Identity(), at) as live:
        for _ in range(2):
            sum(tensor.sum() for tensor in tree_leaves(model(torch.ones(2, 1, 3)))).backward()
    assert {str(row["site"]): row["calls"] for row in live.effects.rows()} == dict.fromkeys(
        sites, 2
    )
    assert live.ledger.table().count("lstm") + live.ledger.table().count("first") == len(sites)


def _residual(inner: nn.Module) -> Made:
    """A module that returns its input, or a list of it, with other uses of that input."""

    def forward(self: Made, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.inner(h)
        return h + 3 * (y[0] if isinstance(y, list) else y)

    return Made(forward, first=Double(), inner=inner)


def _twice_recomputed(self: Made, x: Tensor) -> Tensor:
    return recomputed(self.inner, recomputed(self.inner, x, True) ** 2, True) ** 2


RELU = nn.Sequential(Double(), nn.ReLU(inplace=True), Double())
NEGATED = nn.Sequential(Double(), Made(lambda self, x: x.neg_()))
BY_VALUE = gs.ScaleBySign(positive=10.0, negative=0.0, of="value")


@pytest.mark.parametrize(
    ("model", "transform", "at", "x", "grad"),
    [
        # A module that returns its input: 1 + 3 of which 3 is the branch of that output.
        (_residual(nn.Identity()), TEN, "inner", (1.0,), [2 + 2 * 3 * 10]),
        (_residual(nn.Dropout(0.5).eval()), TEN, "inner", (1.0,), [2 + 2 * 3 * 10]),
        (_residual(nn.Dropout(0.5, inplace=True).eval()), TEN, "inner", (1.0,), [62.0]),
        (_residual(nn.Flatten(0)), TEN, "inner", (1.0,), [2 + 2 * 3 * 10]),
        (_residual(Made(lambda self, x: [x, 1])), TEN, "inner", (1.0,), [2 + 2 * 3 * 10]),
        # An in-place ReLU has a site of its own; the value is that before a later change in place.
        (RELU, gs.Clip(1.0), "1", (3.0, -3.0), [2.0, 0.0]),
        (RELU, TEN, "[01]", (3.0, -3.0), [400.0, 0.0]),
        (NEGATED, BY_VALUE, "0", (1.0, -1.0), [-20.0, 0.0]),
        # f(x) = (2 (2 x)^2)^2 = 64 x^4; d/dy of (2 y^2)^2 = 16 y^3 = 128 at y = 2, clipped to 100.
        (Made(_twice_recomputed, inner=Double()), gs.Clip(100.0), "inner#0", (1.0,), [200.0]),
    ],
)
def test_the_gradient_of_this_output_alone_is_transformed(
    model: nn.Module, transform: Transform, at: str, x: tuple[float, ...], grad: list[float]
) -> None:
    pattern, _, call = at.partition("#")
    outputs = gs.Outputs(pattern, call=int(call) if call else None)
    for _ in range(2):
        assert passed(model, transform, outputs, point(*x))[0] == grad


def test_a_parameter_returned_by_a_module_is_hooked_once_with_its_current_value() -> None:
    soft = Made(lambda self: self.prompt, prompt=nn.Parameter(torch.ones(2)))
    model = Made(lambda self, x: (self.soft() * x).sum(), soft=soft)
    optimizer = sgd(model, lr=1.0)
    transform = gs.ScaleBySign(positive=3.0, negative=0.0, of="value")
    with attached(model, transform, gs.Outputs("soft"), optimizer) as live:
        for expected, start in (([3.0, 3.0], 1.0), ([0.0, 0.0], -2.0)):
            assert model.soft.prompt.tolist() == [start, start]
            optimizer.zero_grad()
            model(torch.ones(2)).backward()
            assert gradients(model)["soft.prompt"].tolist() == expected
            optimizer.step()
    assert calls_of(live) == {"soft#0": 2}
    assert num_hooks(model) == 0
