"""ModuleGradients: PyTorch's full backward hooks, and their limits told instead of suffered."""

import warnings
from typing import Any

import pytest
from torch import Tensor

import gradsurg as gs
from gradsurg.sites.places import Selector
from tests.nets import attached, backward, small
from tests.sites.points import Made, calls_of, grad_of, point

KINDS = ("full_backward_pre", "full_backward")


def _tail(kind: str) -> str:
    return ".input" if kind == "full_backward" else ""


def _caller() -> Made:
    """Three tensors by position and by keyword, three results in a tuple and in a list."""

    def several(self: Made, a: Tensor, b: Tensor, *rest: Any, **words: Any) -> tuple[Any, ...]:
        return a * 3, b * 5, [value * 7 for value in words.values()], len(rest)

    def forward(self: Made, *tensors: Tensor) -> Tensor:
        a, b, c = (tensor * 1 for tensor in tensors)
        three, five, (seven,), _ = self.several(a, b, None, c=c)
        return (three + five + seven).sum()

    return Made(forward, several=Made(several))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_a_path_and_unseen_ones_are_reported(kind: Any) -> None:
    model, xs = _caller(), [point(), point(), point()]
    with attached(model, gs.Scale(10.0), gs.ModuleGradients("several", kind=kind)) as live:
        model(*xs).backward()
    assert [grad_of(x) for x in xs] == [[30.0], [50.0], [7.0]]
    hidden = "several#0.input.c" if kind == "full_backward" else "several#0.2.0"
    tail = _tail(kind)
    assert calls_of(live) == {f"several#0{tail}.0": 1, f"several#0{tail}.1": 1, hidden: 0}
    assert f"{hidden}  (a full backward hook does not see it)" in live.ledger.table()


@pytest.mark.parametrize(
    "at",
    [
        gs.ModuleGradients("*"),
        gs.ModuleGradients("*", kind="full_backward"),
        gs.EveryModule("*", kind="full_backward_pre"),
        gs.EveryModule("*", kind="full_backward"),
    ],
)
def test_pytorchs_warning_about_such_inputs_is_suppressed_only_inside_the_block(
    at: Selector,
) -> None:
    model, filters = small(), list(warnings.filters)
    with attached(model, gs.Identity(), at):
        with attached(model, gs.Scale(1.0), at):
            backward(model)
        backward(model)  # warnings are errors here
    assert warnings.filters == filters
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        backward(model)
