"""Activations: what flows forward is changed once at each site, and backward follows."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.triggers.base import Trigger
from tests.nets import attached
from tests.sites.points import (
    Acts,
    Made,
    Times,
    calls_of,
    grad_of,
    names_of_sites,
    passed,
    point,
    recomputed,
)

ROUND = Acts(torch.round)  # a quantisation: its derivative is zero


def test_straight_through_can_be_written_to_and_differentiated_twice() -> None:
    model, x = nn.Sequential(Times(3.0), nn.ReLU(inplace=True)), point(1.0)
    with attached(model, ROUND, gs.Activations("0", backward="straight")):
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        first.sum().backward()
    # y = relu(round(3x)), d y^2 / dx = 2 * 3 * 3, again 2 * 3 * 3.
    assert first.tolist() == [18.0]
    assert grad_of(x) == [18.0]


# States.


HALVED = gs.Momentum(0.5)


def _outputs(
    model: nn.Module, surgery: gs.Surgery, calls: Sequence[tuple[bool, float]]
) -> list[float]:
    """Return the output of each call: with gradients or without, and its input."""
    with surgery.attach(model):
        outputs: list[float] = []
        for has_gradients, x in calls:
            with torch.set_grad_enabled(has_gradients):
                outputs.append(model(point(x)).item())
        return outputs


@pytest.mark.parametrize(
    "at",
    [
        gs.Activations("0"),
        gs.Activations("1", side="input", backward="straight"),
        gs.EveryModule("0", kind="forward"),
    ],
)
def test_a_call_without_gradients_is_transformed_and_changes_no_state(at: Selector) -> None:
    model = nn.Sequential(Times(1.0), Times(1.0))
    calls = [(False, 8.0), (True, 4.0), (False, 2.0), (False, 2.0), (True, 2.0), (True, 0.0)]
    surgery = gs.Surgery(gs.Intervention(HALVED, at))
    assert _outputs(model, surgery, calls) == [8.0, 4.0, 4.0, 4.0, 4.0, 2.0]
    # A trigger that fires at 3 and then until it sees less than 1.
    calls = [(False, 4.0), (True, 2.0), (True, 4.0), (False, 0.0), (True, 2.0)]
    surgery = gs.Surgery(gs.Intervention(gs.Scale(10.0), at, gs.Threshold(3.0, release=1.0)))
    assert _outputs(model, surgery, calls) == [40.0, 2.0, 40.0, 0.0, 20.0]


def test_the_forward_of_a_reentrant_checkpoint_changes_the_state_once() -> None:
    model = Saved(Times(1.0), reentrant=True)
    surgery = gs.Surgery(gs.Intervention(HALVED, gs.Activations("inner.0")))
    calls = [(True, 4.0), (True, 4.0), (False, 4.0), (False, 4.0), (True, 4.0)]
    # The squares of 4, 4 / 2 + 4, and 6 / 2 + 4 without and with gradients.
    assert _outputs(model, surgery, calls) == [16.0, 36.0, 49.0, 49.0, 49.0]


# One tensor, one site.


FORK = Made(
    lambda self, x: self.left(x) + self.right(x), left=nn.Sequential(Times(3.0)), right=Times(5.0)
)
WRITTEN = nn.Sequential(Times(-3.0), nn.ReLU(inplace=True), Times(1.0))
BOTH = gs.Activations("0") | gs.Activations("0", side="input")
FORKED = [["left#0.input", "left.0#0.input"], ["right#0.input"]]
MIX = Made(
    lambda self, x: self.mix(x, {"h": x * 2}, mask=x * 4, count=torch.ones(1).long())["sum"],
    mix=Made(lambda self, x, other, mask, count: {"sum": x + other["h"] + mask, "count": count}),
)


@pytest.mark.parametrize(
    ("model", "at", "factor", "value", "sites"),
    [
        # An input passed to a child is changed once, and one passed to siblings at each.
        (FORK, gs.Activations(side="input"), 10.0, 80.0, FORKED),
        (FORK, gs.Activations(side="input"), 1.0, 8.0, FORKED),
        # -3 becomes 3, which relu leaves as it is and the transform makes -3.
        (WRITTEN, gs.Activations("re:[01]"), -1.0, -3.0, [["0#0"], ["1#0"]]),
        (nn.Sequential(Times(3.0)), BOTH, 10.0, 300.0, [["0#0.input"], ["0#0"]]),
        # Nested values and keyword inputs are rebuilt, and integers left.
        (MIX, gs.Activations("mix"), 10.0, 70.0, [["mix#0.sum"]]),
        (
            MIX,
            gs.Activations("mix", side="input"),
            10.0,
            70.0,
            [[f"mix#0.input.{place}"] for place in ("0", "1.h", "mask")],
        ),
    ],
)
def test_a_tensor_is_changed_once_at_its_first_site(
    model: nn.Module, at: Selector, factor: float, value: float, sites: list[list[str]]
) -> None:
    with attached(model, gs.Scale(factor), at) as live:
        assert model(torch.ones(1)).item() == value
    assert names_of_sites(live) == sites
    assert {entry.calls for entry in live.ledger} == {1}


def test_a_tensor_passed_to_a_second_call_is_changed_again() -> None:
    model = Made(
        lambda self, x, left: self.left(x) if left else self.right(x),
        left=nn.Identity(),
        right=nn.Identity(),
    )
    x = torch.ones(1)
    with attached(model, gs.Identity(), gs.Activations()) as live:
        for left in (True, True, False):
            model(x, left)
        model.right(x)
        model.right(x)
    assert calls_of(live) == {"left#0": 2, "right#0": 3}


# Checkpoints.


class Saved(nn.Module):
    """The inner modules under a checkpoint; y = inner(x)^2, what is saved depends on the value."""

    def __init__(self, *inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self._run, x, self.reentrant).sum()

    def _run(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2)


def _tanh(reentrant: bool = False) -> tuple[Saved, Tensor]:
    return Saved(Times(2.0), nn.Tanh(), reentrant=reentrant), point(0.3)


def _assert_gradient(x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    z = point(0.3)
    function(z).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_a_scheduled_transform_is_allowed_in_a_recomputation() -> None:
    transform = gs.Scheduled(gs.Scale(3.0), start=1.0)
    assert passed(_tanh()[0], transform, gs.Activations("inner.0"))[1] == {"inner.0#0": 2}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("transform", "change", "why"),
    [
        (gs.GrokfastEMA(), lambda live: None, r"GrokfastEMA\(.*\) keeps a state"),
        (gs.AddNoise(), lambda live: None, r"AddNoise\(.*\) may draw random numbers"),
        (gs.Scale(1.5), lambda live: live.tick(), "changed since the forward"),
        (gs.Scale(1.5), lambda live: live.set("scale", factor=3.0), "changed since"),
        (gs.Scale(1.5), lambda live: live.switch("flag", on=False), "changed since"),
    ],
)
def test_a_recomputation_that_would_give_other_values_is_refused(
    transform: Any, change: Callable[[gs.Live], None], why: str, reentrant: bool
) -> None:
    model, x = _tanh(reentrant)
    at, when = gs.Activations("inner.0"), gs.Flag("flag", on=True)
    with attached(model, transform, at, when=when) as live:
        y = model(x)
        change(live)
        with pytest.raises(
            RuntimeError, match=rf"'inner\.0#0': a checkpoint computes this .*{why}"
        ):
            y.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "at", [gs.Activations("inner.0"), gs.EveryModule("inner.0", kind="forward")]
)
def test_a_recomputation_after_the_block_is_refused(reentrant: bool, at: Selector) -> None:
    model, x = _tanh(reentrant)
    with attached(model, gs.Scale(1.5), at):
        y = model(x)
    with pytest.raises(RuntimeError, match=r"site 'inner\.0#0': .*the block has ended"):
        y.backward()
    assert x.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", [gs.Always(), gs.Steps(start=1)])
def test_a_backward_after_the_next_steps_forward_is_refused(reentrant: bool, when: Trigger) -> None:
    """The newest forward is recorded, and this one did something else."""
    model, x = _tanh(reentrant)
    with attached(model, gs.Scale(1.5), gs.Activations("inner.0"), when=when) as live:
        first = model(x)
        live.tick()
        second = model(x)
        with pytest.raises(RuntimeError, match=r"'inner\.0#0': .*called again since, and the step"):
            first.backward()
        assert x.grad is None
        second.backward()
    _assert_gradient(x, lambda z: torch.tanh(3 * z).pow(2))


def test_calls_that_differ_cannot_be_told_apart_in_a_recomputation() -> None:
    twice = Times(2.0)
    model = Saved(twice, nn.Tanh(), twice)
    with (
        pytest.raises(RuntimeError, match=r"'inner\.0#0': .*does not say which call it is"),
        attached(model, gs.Scale(1.5), gs.Activations("inner.0", call=0)),
    ):
        model(point(0.3)).backward()
    x = point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("re:inner.[02]")):
        model(x).backward()
    _assert_gradient(x, lambda z: (3 * torch.tanh(3 * z)).pow(2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("call", "slope"), [(0, 18.0), (1, 36.0)])
def test_a_call_outside_a_checkpoint_may_differ_from_one_that_is_recomputed(
    reentrant: bool, saves: bool, call: int, slope: float
) -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu() if saves else nullcontext():
            y = model.inner(x)
        return y.pow(2)

    def forward(self: Made, x: Tensor) -> Tensor:
        if call:
            return recomputed(run, self.inner(x), reentrant).sum()
        return self.inner(recomputed(run, x, reentrant)).sum()

    model, x = Made(forward, inner=Times(2.0)), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("inner", call=call)) as live:
        for _ in range(2):
            model(x).backward()
    _assert_gradient(x, lambda z: 2 * slope * z.pow(2))
    assert calls_of(live) == {f"inner#{call}": 4}
