"""Activations: what flows forward is changed once at each site, and backward follows."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.base import Selector
from gradsurg.triggers.base import Trigger
from tests.nets import attached
from tests.sites.points import Acts, Made, Times, calls_of, grad_of, passed, point, recomputed

ROUND = Acts(torch.round)  # a quantisation: its derivative is zero


def test_a_doubled_output_doubles_the_gradient_too() -> None:
    model, x = nn.Sequential(Times(3.0), Times(5.0)), point()
    with attached(model, gs.Scale(2.0), gs.Activations("0")) as live:
        y = model(x)
        y.sum().backward()
    assert y.tolist() == [30.0]
    assert grad_of(x) == [30.0]
    assert calls_of(live) == {"0#0": 1}
    assert model(x).tolist() == [15.0]


@pytest.mark.parametrize(
    ("how", "value", "grad"), [("through", 14.0, 0.0), ("straight", 14.0, 12.0)]
)
def test_rounding_blocks_the_gradient_or_passes_it_straight_through(
    how: Any, value: float, grad: float
) -> None:
    # 3 * 2.25 = 6.75, rounded 7, times 2; then d/dx = 2 * 1 * 6 where it passes straight.
    model, x = nn.Sequential(Times(6.0), Times(2.0)), point(1.125)
    with attached(model, ROUND, gs.Activations("0", backward=how)):
        y = model(x)
        y.sum().backward()
    assert y.tolist() == [value]
    assert grad_of(x) == [grad]


def test_straight_through_adds_no_rounding_error_in_the_forward() -> None:
    values = (0.1, -0.3, 1e30, -0.0, float("inf"), 3.3e-7)
    model, x = nn.Sequential(Times(1.0)), point(*values)
    expected = torch.tensor(values) * 0.7
    with attached(model, gs.Scale(0.7), gs.Activations("0", backward="straight")):
        y = model(x)
    assert torch.equal(y, expected)
    assert torch.equal(y.signbit(), expected.signbit())
    assert not torch.equal(x + (expected - x), expected)


def test_straight_through_can_be_written_to_and_differentiated_twice() -> None:
    model, x = nn.Sequential(Times(3.0), nn.ReLU(inplace=True)), point(1.0)
    with attached(model, ROUND, gs.Activations("0", backward="straight")):
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        first.sum().backward()
    # y = relu(round(3x)), d y^2 / dx = 2 * 3 * 3, again 2 * 3 * 3.
    assert first.tolist() == [18.0]
    assert grad_of(x) == [18.0]


# One tensor, one site.


def test_a_container_and_an_identity_do_not_change_a_value_again() -> None:
    model = nn.Sequential(nn.Sequential(Times(3.0), nn.Identity(), nn.Dropout(0.5).eval()))
    with attached(model, gs.Scale(10.0), gs.Activations()) as live:
        assert model(torch.ones(1)).item() == 30.0
    (entry,) = live.ledger
    assert (entry.site, entry.aliases) == ("0.0#0", ["0.1#0", "0.2#0", "0#0"])


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


def test_an_input_passed_to_a_child_is_changed_once_and_one_passed_to_siblings_at_each() -> None:
    model = Made(
        lambda self, x: self.left(x) + self.right(x),
        left=nn.Sequential(Times(3.0)),
        right=Times(5.0),
    )
    with attached(model, gs.Scale(10.0), gs.Activations(side="input")) as live:
        assert model(torch.ones(1)).item() == 80.0
    assert calls_of(live) == {"left#0.input": 1, "right#0.input": 1}
    assert next(iter(live.ledger)).aliases == ["left.0#0.input"]
    # Also where the transform leaves it alone.
    with attached(model, gs.Identity(), gs.Activations(side="input")) as live:
        model(torch.ones(1))
    assert calls_of(live) == {"left#0.input": 1, "right#0.input": 1}


def test_a_tensor_changed_in_place_is_another_value() -> None:
    model = nn.Sequential(Times(-3.0), nn.ReLU(inplace=True), Times(1.0))
    with attached(model, gs.Scale(-1.0), gs.Activations("re:[01]")) as live:
        # -3 becomes 3, which relu leaves as it is and the transform makes -3.
        assert model(torch.ones(1)).item() == -3.0
    assert calls_of(live) == {"0#0": 1, "1#0": 1}


def test_a_module_that_writes_to_its_input_writes_to_the_transformed_one() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True)), torch.tensor([-1.0])
    with attached(model, gs.Scale(-2.0), gs.Activations("0", side="input")):
        assert model(x).item() == 2.0
    assert x.item() == -1.0
    model(x)
    assert x.item() == 0.0


def test_the_input_and_the_output_of_a_module_are_two_sites_when_both_are_asked_for() -> None:
    model = nn.Sequential(Times(3.0))
    both = gs.Activations("0") | gs.Activations("0", side="input")
    with attached(model, gs.Scale(10.0), both) as live:
        assert model(torch.ones(1)).item() == 300.0
    assert calls_of(live) == {"0#0": 1, "0#0.input": 1}


# Where.


def test_nested_values_and_keyword_inputs_are_rebuilt_and_integers_left() -> None:
    model = Made(
        lambda self, x: self.mix(x, {"h": x * 2}, mask=x * 4, count=torch.ones(1).long()),
        mix=Made(
            lambda self, x, other, mask, count: {"sum": x + other["h"] + mask, "count": count}
        ),
    )
    with attached(model, gs.Scale(10.0), gs.Activations("mix", side="input")) as live:
        y = model(torch.ones(1))
    assert (y["sum"].item(), y["count"].item()) == (70.0, 1)
    assert calls_of(live) == {"mix#0.input.0": 1, "mix#0.input.1.h": 1, "mix#0.input.mask": 1}
    with attached(model, gs.Scale(10.0), gs.Activations("mix")) as live:
        assert model(torch.ones(1))["sum"].item() == 70.0
    assert calls_of(live) == {"mix#0.sum": 1}


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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["through", "straight"])
@pytest.mark.parametrize(("pattern", "side"), [("*", "output"), ("inner*", "input")])
def test_a_recomputation_gives_the_same_values(
    reentrant: bool, how: Any, pattern: str, side: Any
) -> None:
    model, plain = (
        Saved(Times(2.0), nn.Identity(), nn.Tanh(), reentrant=reentrant),
        nn.Sequential(Times(2.0), nn.Identity(), nn.Tanh()),
    )
    x, z = point(0.3), point(0.3)
    at = gs.Activations(pattern, side=side, backward=how)
    with attached(plain, gs.Scale(1.5), gs.Activations(side=side, backward=how)):
        y = plain(z).pow(2).sum()
    y.backward()
    with attached(model, gs.Scale(1.5), at) as live:
        out = model(x)
        out.backward()
    assert out.item() == y.item()
    assert grad_of(x) == grad_of(z)
    assert all(calls in (1, 2) for calls in calls_of(live).values())


def test_a_scheduled_transform_is_allowed_in_a_recomputation() -> None:
    model = Saved(Times(2.0), nn.Tanh())
    transform = gs.Scheduled(gs.Scale(3.0), start=1.0)
    assert passed(model, transform, gs.Activations("inner.0"))[1] == {"inner.0#0": 2}


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (gs.GrokfastEMA(), r"GrokfastEMA\(.*\) keeps a state"),
        (gs.AddNoise(), r"AddNoise\(.*\) may draw random numbers"),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_transform_that_would_give_other_values_is_refused_in_a_recomputation(
    transform: Any, why: str, reentrant: bool
) -> None:
    model, x = Saved(Times(2.0), nn.Tanh(), reentrant=reentrant), point(0.3)
    with (
        pytest.raises(RuntimeError, match=rf"site 'inner\.0#0': it is recomputed .*{why}"),
        attached(model, transform, gs.Activations("inner.0")),
    ):
        model(x).backward()


def test_a_surgery_that_was_changed_since_the_forward_is_refused_in_a_recomputation() -> None:
    changes: list[Callable[[gs.Live], None]] = [
        lambda live: live.tick(),
        lambda live: live.set("scale", factor=3.0),
        lambda live: live.switch("flag", on=False),
    ]
    for change in changes:
        model, x = Saved(Times(2.0), nn.Tanh()), point(0.3)
        at = gs.Activations("inner.0")
        with attached(model, gs.Scale(1.5), at, when=gs.Flag("flag", on=True)) as live:
            y = model(x)
            change(live)
            with pytest.raises(RuntimeError, match=r"site 'inner\.0#0': .* changed since the forw"):
                y.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "at", [gs.Activations("inner.0"), gs.EveryModule("inner.0", kind="forward")]
)
def test_a_recomputation_after_the_block_is_refused(reentrant: bool, at: Selector) -> None:
    model, x = Saved(Times(2.0), nn.Tanh(), reentrant=reentrant), point(0.3)
    with attached(model, gs.Scale(1.5), at):
        y = model(x)
    with pytest.raises(RuntimeError, match=r"site 'inner\.0#0': .*the block has ended"):
        y.backward()
    assert x.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", [gs.Always(), gs.Steps(start=1)])
def test_a_backward_after_the_next_steps_forward_is_refused(reentrant: bool, when: Trigger) -> None:
    """What is known of the calls is what the newest forward did, and this one did another thing."""
    model, x = Saved(Times(2.0), nn.Tanh(), reentrant=reentrant), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("inner.0"), when=when) as live:
        first = model(x)
        live.tick()
        second = model(x)
        with pytest.raises(RuntimeError, match=r"'inner\.0#0': .*called again since, and the step"):
            first.backward()
        assert x.grad is None
        second.backward()
    z = point(0.3)
    torch.tanh(3 * z).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_their_backwards_are_recomputed_alike(reentrant: bool) -> None:
    model, x = Saved(Times(2.0), nn.Tanh(), reentrant=reentrant), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("inner.0")):
        first, second = model(x), model(x)
        with torch.no_grad():
            model(x)
        (first + second).backward()
    z = point(0.3)
    (2 * torch.tanh(3 * z).pow(2).sum()).backward()
    torch.testing.assert_close(x.grad, z.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_guard_of_a_recomputation_keeps_nothing_alive(reentrant: bool) -> None:
    model = Saved(Times(2.0), nn.Tanh(), reentrant=reentrant)
    held = ref(model.inner)
    with attached(model, gs.Scale(1.5), gs.Activations("inner.0")):
        y = model(point(0.3))
        out = ref(y)
        y.backward()
        del y
        gc.collect()
        assert out() is None
    del model
    gc.collect()
    assert held() is None


def test_calls_that_differ_cannot_be_told_apart_in_a_recomputation() -> None:
    twice = Times(2.0)
    model = Saved(twice, nn.Tanh(), twice)
    with (
        pytest.raises(RuntimeError, match=r"'inner\.0#0': .*does not say which call it is"),
        attached(model, gs.Scale(1.5), gs.Activations("inner.0", call=0)),
    ):
        model(point(0.3)).backward()
    x, z = point(0.3), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("re:inner.[02]")):
        model(x).backward()
    (3 * torch.tanh(3 * z)).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("call", "slope"), [(0, 18.0), (1, 36.0)])
def test_a_call_outside_a_checkpoint_may_differ_from_one_that_is_recomputed(
    reentrant: bool, saves: bool, call: int, slope: float
) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Times(2.0)

        def forward(self, x: Tensor) -> Tensor:
            y = recomputed(self._run, self.inner(x) if call else x, reentrant)
            return (y if call else self.inner(y)).sum()

        def _run(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu() if saves else nullcontext():
                y = self.inner(x)
            return y.pow(2)

    model, x, z = Partly(), point(0.3), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations("inner", call=call)) as live:
        for _ in range(2):
            model(x).backward()
    (2 * slope * z.pow(2)).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    assert calls_of(live) == {f"inner#{call}": 4}


def test_a_checkpoint_that_stops_early_does_not_confuse_the_next_forward() -> None:
    model, x = Saved(nn.Sequential(nn.Tanh(), nn.Identity()), Times(2.0)), point(0.3)
    with attached(model, gs.Scale(1.5), gs.Activations()) as live:
        for _ in range(2):
            model(x).backward()
        y = model(x)
    (entry,) = [entry for entry in live.ledger if entry.site == "inner.0.0#0"]
    assert entry.aliases == ["inner.0.1#0", "inner.0#0"]
    torch.testing.assert_close(y, (torch.tanh(x) * 1.5 * 2.0 * 1.5).pow(2).sum())


# Other contexts.


@pytest.mark.parametrize("how", ["through", "straight"])
def test_it_works_in_a_functional_gradient_and_under_vmap(how: Any) -> None:
    model = nn.Sequential(Times(3.0))
    with attached(model, gs.Scale(2.0), gs.Activations("0", backward=how), effects_every=0):
        grads = torch.func.vmap(torch.func.grad(lambda x: model(x).pow(2)))(torch.ones(2))
    # (6x)^2: 72 through; 2 * 6 * 3 straight.
    assert grads.tolist() == ([72.0] * 2 if how == "through" else [36.0] * 2)


def test_a_trigger_can_look_at_the_value_that_passes() -> None:
    model = nn.Sequential(Times(1.0))
    with attached(model, gs.Scale(10.0), gs.Activations("0"), when=gs.Threshold(above=2.0)) as live:
        assert model(torch.tensor([1.0])).item() == 1.0
        assert model(torch.tensor([3.0])).item() == 30.0
    assert calls_of(live) == {"0#0": 2}
