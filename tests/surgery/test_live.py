"""Changing a surgery while it is attached: from when on, with what kept, and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.torch_internals import autograd
from tests.nets import attached, backward, grad_of, num_hooks, small, train, trainee
from tests.sites.points import Noted, Sums


def _passed(model: nn.Module, x: float = 1.0) -> float:
    """What comes of a gradient."""
    model.zero_grad()
    model(x).backward()
    (param,) = model.parameters()
    return grad_of(param).item()


def _scale(factor: float, name: str = "", at: gs.Trigger | None = None) -> gs.Intervention:
    names = (name,) if name else ()
    return gs.Intervention(gs.Scale(factor), when=at or gs.Always(), names=names)


def in_backward(model: nn.Module, name: str, action: Callable[[], object]) -> None:
    """Have `action` done once, when the gradient of a module's output comes by."""

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        handle.remove()
        output.register_hook(lambda grad: (action(), None)[1])

    handle = model.get_submodule(name).register_forward_hook(hook)


# From the next backward on


def test_on_a_graph_that_is_there_hooks_are_set_and_removed_and_none_is_added() -> None:
    model = small()

    def gradient(loss: Tensor | None = None) -> Tensor:
        loss = model(torch.ones(2, 6)).sum() if loss is None else loss
        return torch.autograd.grad(loss, model.first.bias, retain_graph=True)[0]

    plain = gradient()
    with attached(model, gs.Scale(2.0), gs.Outputs("first")) as live:
        loss = model(torch.ones(2, 6)).sum()
        live.add(gs.Intervention(gs.Zero(), gs.Outputs("first")))
        live.set("scale", factor=3.0)
        torch.testing.assert_close(gradient(loss), plain * 3)
        live.remove("scale")
        torch.testing.assert_close(gradient(loss), plain)
        assert not gradient().any()


# Kept state


def test_set_keeps_the_state_of_the_transform() -> None:
    model = Sums()
    with attached(model, gs.GrokfastEMA(decay=0.5, strength=1.0), effects_every=0) as live:
        assert _passed(model, 4.0) == 8.0  # m = 4
        live.set("grokfast_ema", strength=2.0)
        assert _passed(model, 8.0) == 20.0  # m = 6
        live.set("grokfast_ema", when=gs.Threshold(0.0))
        assert _passed(model, 2.0) == 10.0  # m = 4


def test_the_memory_of_a_trigger_that_is_replaced_is_dropped() -> None:
    model = Sums()
    first, second = gs.Threshold(2.0, release=1.0), gs.Threshold(2.5, release=1.0)
    with attached(model, gs.Scale(10.0), when=first, effects_every=0) as live:
        assert [_passed(model, x) for x in (3.0, 1.5)] == [30.0, 15.0]
        live.set("scale", factor=2.0)
        assert _passed(model, 1.5) == 3.0
        live.set("scale", when=second)
        assert _passed(model, 1.5) == 1.5
        live.set("scale", when=first)
        assert _passed(model, 1.5) == 1.5


def test_what_is_removed_takes_its_state_with_it() -> None:
    model = Sums()
    grokfast_ema = gs.Intervention(gs.GrokfastEMA(decay=0.5, strength=1.0))
    surgery = gs.Surgery(grokfast_ema, _scale(1.0, at=gs.Threshold(0.0, release=0.0)))
    with surgery.attach(model) as live:
        _passed(model, 4.0)
        live.remove("grokfast_ema")
        states: Any = surgery.state_dict()["states"]
        assert list(states) == ["scale/w/when"]
        assert live.add(grokfast_ema) == "grokfast_ema"
        assert _passed(model, 8.0) == 16.0  # it has begun anew: m = 8
        live.remove("scale")
        assert list(surgery.state_dict()["states"]) == ["grokfast_ema/w"]  # pyright: ignore[reportArgumentType]


def test_one_link_of_a_chain_is_set_by_its_own_label() -> None:
    model = Sums()
    with attached(model, gs.Chain(gs.Scale(2.0), gs.Clip(5.0))) as live:
        assert live.labels == (("scale", "clip"),)
        live.set("scale", factor=4.0)
        assert _passed(model, 1.0) == 4.0
        live.set("clip", value=3.0)
        assert _passed(model, 1.0) == 3.0
        live.set("scale -> clip", when=gs.Flag("a"))
        assert _passed(model, 1.0) == 1.0
        live.remove("scale -> clip")
        assert live.interventions == ()


# Labels, and what the surgery knows


def test_labels_are_never_the_same_twice() -> None:
    model = Sums()
    with attached(model, gs.Scale(2.0)) as live:
        chain = gs.Intervention(gs.Chain(gs.Scale(1.0), gs.Scale(1.0)))
        labels = [live.add(_scale(1.0)), live.add(chain), live.add(_scale(1.0, "mine"))]
        labels.append(live.add(_scale(1.0, "mine")))
        assert labels == ["scale_2", "scale_3 -> scale_4", "mine", "mine_2"]
        live.remove("scale")
        assert live.add(_scale(1.0)) == "scale"
        _passed(model)


def test_a_trigger_that_is_refused_leaves_the_state_of_the_old_one() -> None:
    model = Sums()
    with gs.Surgery(_scale(2.0, at=gs.Threshold(3.0, release=1.0))).attach(model) as live:
        assert _passed(model, 4.0) == 8.0
        with pytest.raises(LookupError, match="gone"):
            live.set("scale", when=gs.Threshold(0.0, source="output:gone"))
        assert _passed(model, 2.0) == 4.0  # it fires until it sees less than 1


def test_after_a_load_the_gradients_of_the_step_are_counted_anew() -> None:
    model, noted = Sums(), Noted()
    surgery = gs.Surgery(gs.Intervention(noted))
    with surgery.attach(model):
        at_start = surgery.state_dict()
        for _ in range(2):
            _passed(model)
        surgery.load_state_dict(at_start)
        _passed(model)
    assert noted.calls == [0, 1, 0]


def test_the_surgery_follows_and_stays_so_after_the_block() -> None:
    model = Sums()
    surgery = gs.Surgery(_scale(2.0), _scale(3.0, "gone"))
    with surgery.attach(model) as live:
        live.set("scale", factor=4.0)
        new = gs.Intervention(gs.GrokfastEMA(decay=0.5, strength=1.0), names=("new",))
        live.add(new)
        live.remove("gone")
        expected = _scale(4.0), new
        _passed(model)
        assert (surgery.interventions, live.interventions) == (expected, expected)
        assert surgery.labels == live.labels == (("scale",), ("new",))
        state = surgery.state_dict()
    assert surgery.interventions == expected
    assert surgery.labels == (("scale",), ("new",))
    assert state["transforms"] == surgery.state_dict()["transforms"]
    other = gs.Surgery(*expected)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="it is of another surgery"):
        gs.Surgery(_scale(2.0), _scale(3.0)).load_state_dict(state)
    twice = pytest.warns(
        gs.SurgeryWarning, match="two surgeries with this intervention are attached"
    )
    with twice, surgery.attach(model), other.attach(model):
        # The mean stays 4, so 4 + 4; of that 4 times is 32, the mean (4 + 32) / 2, so 32 + 18.
        assert _passed(model) == 50.0


def test_effects_and_ledger_know_what_was_added_and_what_was_removed() -> None:
    model = Sums()
    with attached(model, gs.Scale(2.0)) as live:
        _passed(model)
        live.add(gs.Intervention(gs.Clip(1.0)))
        _passed(model)
        live.remove("scale")
        _passed(model)
    assert {entry.intervention: entry.all_fired for entry in live.ledger} == {"scale": 2, "clip": 2}
    rows = [(row["transform"], row["calls"]) for row in live.effects.rows()]
    assert rows == [("scale", 2), ("clip", 2)]
    assert live.examples == {}  # no intervention needs those


# Hooks


def test_a_trigger_that_is_set_brings_its_eyes_and_takes_them_along() -> None:
    model = small()
    with attached(model, gs.Scale(1.0)) as live:
        bare = num_hooks(model)
        for _ in range(3):
            live.set("scale", when=gs.Shape(above=7, source="output:act"))
            # Of the module, and of the model's beginning and end.
            assert num_hooks(model) == bare + 3
            backward(model)
            live.set("scale", factor=2.0)
            assert num_hooks(model) == bare + 3
        live.set("scale", when=gs.Shape(above=7))
        assert num_hooks(model) == bare + 2
        backward(model)
        live.set("scale", when=gs.Always())
        assert num_hooks(model) == bare
        assert live.clock.observations == {}
    assert num_hooks(model) == 0


def test_a_trigger_set_after_the_forward_it_would_have_looked_at_says_so() -> None:
    model = small()
    with attached(model, gs.Scale(1.0)) as live:
        loss = model(torch.ones(8, 6)).sum()
        live.set("scale", when=gs.Shape(above=7))
        with pytest.raises(RuntimeError, match="inside the model's forward, after attaching"):
            loss.backward()
        backward(model)


@pytest.mark.parametrize("when", [gs.Always(), gs.Shape(above=1, source="output:act")], ids=repr)
def test_an_add_that_fails_half_way_undoes_itself(when: gs.Trigger) -> None:
    model, optimizer = trainee()
    other = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with attached(model, gs.Scale(1.0), None, optimizer) as live:
        before = num_hooks(model), live.interventions, live.labels, list(live.ledger)
        wrong = gs.Intervention(gs.Zero(), gs.Parameters(stage="step"), when)
        live.bind(other)
        with pytest.raises(ValueError, match="pass one for last.weight, last.bias"):
            live.add(wrong)
        live.bind(optimizer)
        assert (num_hooks(model), live.interventions, live.labels, list(live.ledger)) == before
        assert live.add(gs.Intervention(gs.Zero(), gs.Parameters("last.bias"))) == "zero"
        train(model, optimizer, 1)
    assert num_hooks(model, optimizer, other) == 0


# Refusals


def _set(label: str, **fields: Any) -> Callable[[gs.Live], object]:
    return lambda live: live.set(label, **fields)


def _add(*args: Any, **fields: Any) -> Callable[[gs.Live], object]:
    return lambda live: live.add(gs.Intervention(gs.Zero(), *args, **fields))


CHANGES: list[Callable[[gs.Live], object]] = [
    _add(),
    _set("scale", factor=0.0),
    lambda live: live.remove("scale"),
    lambda live: live.remove("nothing"),
    lambda live: live.switch("a", on=True),
    gs.Live.next_epoch,
]


@pytest.mark.parametrize("call", CHANGES[:3], ids=range(3))
def test_nothing_is_changed_inside_a_backward(call: Callable[[gs.Live], object]) -> None:
    model, texts = small(), list[str]()

    def change() -> None:
        with pytest.raises(RuntimeError) as caught:
            call(live)
        texts.append(str(caught.value))

    with attached(model, gs.Scale(1.0)) as live:
        in_backward(model, "act", change)
        backward(model)
        assert live.interventions == (gs.Intervention(gs.Scale(1.0)),)
    assert "inside a backward pass" in texts[0]


@pytest.mark.parametrize("call", CHANGES, ids=range(6))
def test_after_the_block_nothing_can_be_changed(call: Callable[[gs.Live], object]) -> None:
    model = Sums()
    with attached(model, gs.Scale(2.0)) as live:
        _passed(model)
    with pytest.raises(RuntimeError, match="the block has ended, and with it the surgery"):
        call(live)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("stage", "rest"),
    [
        ("backward", ()),
        ("backward", (gs.Scale(5.0),)),
        ("step", (gs.Scale(5.0),)),
        ("step", (gs.ClipGlobalNorm(0.1),)),
    ],
    ids=range(4),
)
def test_a_transform_that_closes_the_surgery_is_the_last_to_act(stage, rest, fails: bool) -> None:
    def closing(grad: Tensor) -> Tensor:
        live.close()
        if fails:
            raise ValueError("its own error")
        return 2 * grad

    model = Sums()
    optimizer = torch.optim.SGD(model.parameters())
    at = gs.Parameters(stage=stage)
    live = gs.Surgery(gs.Intervention(gs.Chain(closing, *rest), at)).start(model, optimizer)
    with pytest.raises(ValueError, match="its own") if fails else nullcontext() as caught:
        passed = _passed(model)
        optimizer.step()
        assert [passed, grad_of(model.w).item()] == (
            [2.0] * 2 if stage == "backward" else [1.0, 2.0]
        )
    if caught is not None:
        assert caught.value.__notes__ == ["while function acted at site 'w', step 0"]


@pytest.mark.parametrize(
    "at",
    [
        gs.Outputs(),
        gs.Inputs(),
        gs.Nodes("*"),
        gs.SavedTensors(),
        gs.Activations(),
        gs.Captured(),
        gs.EveryModule(kind="full_backward"),
    ],
    ids=lambda at: type(at).__name__,
)
@pytest.mark.filterwarnings("ignore:scale.*:gradsurg.SurgeryWarning")  # it is closed too early
@pytest.mark.parametrize("change", ["close", "add"])
@pytest.mark.parametrize("side", ["output", "input"])
def test_a_transform_may_change_the_surgery_in_a_forward(
    at: Selector, change: str, side: Literal["output", "input"]
) -> None:
    def closing(x: Tensor) -> Tensor:
        if change == "close":
            live.close()
        elif len(live.interventions) == 2:
            live.add(gs.Intervention(gs.Scale(1.0), gs.Outputs()))
        return 3 * x

    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = nn.Sequential(nn.Sequential(layer))
    first = gs.Intervention(closing, gs.Activations("0.0", side=side))
    live = gs.Surgery(first, gs.Intervention(gs.Scale(1.0), at)).start(model)
    x = torch.ones(1, requires_grad=True)
    assert model(x).item() == 3
    model(x).backward()
    assert grad_of(layer.weight).item() == (1 if change == "close" else 3)
    live.abort()
    assert num_hooks(model) == 0
    assert autograd.saved_tensor_hooks() is None
