"""Combinations of triggers, and triggers written by users."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty
from gradsurg.triggers.base import Clock, Decision, TensorTrigger, TriggerContext
from tests.nets import attached, backward, gradients, num_hooks, sgd, small, train

YES, NO = torch.tensor(True), torch.tensor(False)


@dataclass(frozen=True)
class Says(gs.Trigger):
    """A trigger that returns a given decision and records its calls."""

    answer: Any
    asked: list[TriggerContext] = field(default_factory=list, compare=False)

    def fires(self, context: TriggerContext) -> Decision:
        self.asked.append(context)
        return self.answer


class Looks(Says):
    """The same, marked as decided on the device."""

    on_device = True


class Counts(Stateless):
    """A transform that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.calls += 1
        return grad * 2


def _plain(fires: Decision) -> object:
    return ("device", bool(fires)) if isinstance(fires, Tensor) else fires


DEVICE = ("device", True), ("device", False)


@pytest.mark.parametrize(
    ("left", "other", "both", "either"),
    [
        (True, True, True, True),
        (True, False, False, True),
        (False, False, False, False),
        (True, None, None, True),
        (False, None, False, None),
        (None, None, None, None),
        (True, YES, DEVICE[0], True),
        (True, NO, DEVICE[1], True),
        (False, YES, False, DEVICE[0]),
        (False, NO, False, DEVICE[1]),
        (YES, NO, DEVICE[1], DEVICE[0]),
        (YES, YES, DEVICE[0], DEVICE[0]),
        (NO, NO, DEVICE[1], DEVICE[1]),
        (None, YES, None, None),
        (None, NO, None, None),
    ],
)
def test_and_and_or_of_host_unknown_and_device_decisions(
    left: Decision, other: Decision, both: object, either: object
) -> None:
    for pair in ((left, other), (other, left)):
        first, second = (Says(answer) for answer in pair)
        assert _plain((first & second).fires(TriggerContext(Clock()))) == both
        assert _plain((first | second).fires(TriggerContext(Clock()))) == either


@pytest.mark.parametrize(
    ("answer", "opposite"),
    [(True, False), (False, True), (None, None), (YES, DEVICE[1]), (NO, DEVICE[0])],
)
def test_not_of_host_unknown_and_device_decisions(answer: Decision, opposite: object) -> None:
    assert _plain((~Says(answer)).fires(TriggerContext(Clock()))) == opposite


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_decision_of_the_host_skips_device_triggers(looks_first: bool) -> None:
    for answer, combine in ((False, gs.AllOf), (True, gs.AnyOf)):
        host, device = Says(answer), Looks(YES)
        combined = combine((device, host) if looks_first else (host, device))
        assert combined.fires(TriggerContext(Clock())) is answer
        assert (len(host.asked), len(device.asked)) == (1, 0)


def test_a_decision_of_the_host_skips_device_triggers_in_nested_combinations() -> None:
    device, other = Looks(YES), Looks(NO)
    trigger = (~device | (other & Says(True))) & Says(False)
    assert trigger.fires(TriggerContext(Clock())) is False
    assert device.asked == other.asked == []


def _measured(trigger: Says) -> int:
    return sum(context.grad is not None for context in trigger.asked)


def test_neither_transform_nor_measurement_runs_where_the_host_decides_no() -> None:
    model, transform, device = small(), Counts(), Looks(YES)
    optimizer = sgd(model)
    when = device & gs.Steps(start=2) & gs.Depth(high=1)
    at = gs.Parameters("last.*")
    with attached(model, transform, at, optimizer, when, effects_every=0) as live:
        train(model, optimizer, 2)
        assert (transform.calls, _measured(device)) == (0, 0)
        train(model, optimizer, 1)
        assert (transform.calls, _measured(device)) == (2, 2)
    assert [(entry.calls, entry.all_fired) for entry in live.ledger] == [(3, 1), (3, 1)]


@validated
class Loud(gs.Trigger):
    """A user's trigger: fires where the largest entry exceeds `bound`."""

    bound: float = 0.0

    def fires(self, context: TriggerContext) -> Decision:
        return None if context.grad is None else context.grad.abs().max() > self.bound


class Twice(gs.Trigger):
    """A user's trigger that is no dataclass: fires at the first `count` gradients of a site."""

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None or context.grad is None:
            return None
        seen = context.state.get("seen", torch.zeros((), dtype=torch.int64))
        context.state["seen"] = seen + 1
        return seen < self.count


def test_a_users_trigger_decides_when_the_transform_acts() -> None:
    plain, model = small(), small()
    backward(plain)
    bound = sorted(grad.abs().max().item() for grad in gradients(plain).values())[1]
    with attached(model, gs.Zero(), when=Loud(bound)):
        backward(model)
    for name, grad in gradients(plain).items():
        loud = grad.abs().max() > bound
        expected = torch.zeros_like(grad) if loud else grad
        assert torch.equal(gradients(model)[name], expected)


def test_a_users_trigger_combines_with_built_in_ones() -> None:
    model = small()
    optimizer = sgd(model)
    when = Loud() & gs.Every(2) & ~Loud(1e9)
    with attached(model, gs.Scale(1.0), None, optimizer, when) as live:
        train(model, optimizer, 4)
    assert {entry.all_fired for entry in live.ledger} == {2}


def test_a_users_trigger_has_a_state_for_each_site_in_the_state_dict() -> None:
    model = small()
    surgery = gs.Surgery(gs.Intervention(gs.Scale(1.0), gs.Parameters("last.*"), Twice()))
    with surgery.attach(model) as live:
        for _ in range(3):
            backward(model)
    assert [entry.all_fired for entry in live.ledger] == [2, 2]
    states = surgery.state_dict()["states"]
    assert isinstance(states, dict)
    seen = {key: state["seen"].item() for key, state in states.items()}
    assert seen == {"scale/last.weight/when": 3, "scale/last.bias/when": 3}


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        (1, "found 1"),
        (0, "found 0"),
        ("no", "found 'no'"),
        (torch.ones(3, dtype=torch.bool), "found torch.bool of shape [3]"),
        (torch.tensor(1.0), "found torch.float32 of shape []"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_an_invalid_decision_is_refused(answer: object, described: str, later: bool) -> None:
    class Wrong(gs.Trigger):
        def __repr__(self) -> str:
            return "Wrong()"

        def fires(self, context: TriggerContext) -> Any:
            return None if later and context.site is None else answer

    model = small()
    message = "Wrong(): fires() must return True, False, None or a bool tensor of no dimension, "
    with (
        pytest.raises(TypeError, match=re.escape(message + described)),
        attached(model, gs.Zero(), when=Wrong()),
    ):
        backward(model)
    assert num_hooks(model) == 0


@pytest.mark.parametrize(
    ("combine", "first"), [(gs.AllOf, gs.Always()), (gs.AnyOf, gs.Steps(start=9))]
)
def test_an_invalid_decision_is_refused_in_a_combination(combine: Any, first: gs.Trigger) -> None:
    class Wrong(gs.Trigger):
        def fires(self, context: TriggerContext) -> Any:
            return "yes"

    model = small()
    with (
        pytest.raises(TypeError, match="must return True, False, None"),
        attached(model, gs.Scale(1.0), when=combine((first, Wrong()))),
    ):
        backward(model)


def test_an_unknown_decision_at_a_gradient_is_refused() -> None:
    model = small()
    with (
        pytest.raises(TypeError, match="returned None though it had the gradient"),
        attached(model, gs.Zero(), when=Says(None)),
    ):
        backward(model)


@pytest.mark.parametrize(
    ("later", "note"), [(False, "before a gradient was there"), (True, "at site 'last.bias'")]
)
def test_an_exception_of_a_trigger_names_its_site(later: bool, note: str) -> None:
    class Broken(gs.Trigger):
        def __repr__(self) -> str:
            return "Broken()"

        def fires(self, context: TriggerContext) -> Decision:
            if later and context.site is None:
                return None
            raise ZeroDivisionError("mine")

    model = small()
    with (
        pytest.raises(ZeroDivisionError, match="mine") as caught,
        attached(model, gs.Zero(), gs.Parameters("last.bias"), when=Broken()),
    ):
        backward(model)
    assert caught.value.__notes__ == [f"while Broken() was evaluated {note}, step 0"]
    assert num_hooks(model) == 0


def test_a_users_trigger_may_observe_a_source() -> None:
    class Wide(TensorTrigger):
        source = "output:act"

        def observe(self, tensor: Tensor) -> object:
            return tensor  # it can look at nothing that holds the graph

        def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
            assert isinstance(observation, Tensor)
            assert not observation.requires_grad
            assert observation.grad_fn is None
            return observation.shape[1] == 5

    model = small()
    with attached(model, gs.Scale(1.0), gs.Parameters("last.bias"), when=Wide()) as live:
        backward(model)
    assert [entry.all_fired for entry in live.ledger] == [1]


@pytest.mark.filterwarnings("ignore:clip_global_norm. its trigger never fired")
@pytest.mark.parametrize("answer", [YES, NO], ids=["yes", "no"])
def test_a_device_decision_applies_to_a_whole_group(answer: Tensor) -> None:
    class Late(gs.Trigger):
        def fires(self, context: TriggerContext) -> Decision:
            return None if context.site is None else answer

    model, plain = small(), small()
    optimizer, other = sgd(model), sgd(plain)
    train(plain, other, 1)
    with attached(model, gs.ClipGlobalNorm(1e-3), None, optimizer, Late()) as live:
        train(model, optimizer, 1)
    alike = [torch.equal(gradients(model)[name], grad) for name, grad in gradients(plain).items()]
    assert alike == [not answer] * 4
    assert {entry.all_fired for entry in live.ledger} == {int(answer)}


def test_a_groups_state_does_not_advance_where_the_device_decides_no() -> None:
    answers = [True, False, True]

    class Late(gs.Trigger):
        def fires(self, context: TriggerContext) -> Decision:
            return None if context.site is None else torch.tensor(answers[context.step])

    def norms(when: gs.Trigger) -> list[float]:
        model = small()
        optimizer = sgd(model, lr=0.0)
        transform = gs.Chain(gs.NormMatched(gs.Chain(gs.GrokfastEMA(0.5), gs.ClipGlobalNorm(1e9))))
        at = gs.Parameters(stage="step")
        norms = []
        with attached(model, transform, at, optimizer, when):
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                norms.append(gradients(model)["last.bias"].norm().item())
        return norms

    @validated
    class Only(gs.Trigger):
        def fires(self, context: TriggerContext) -> Decision:
            return answers[context.step % 3]

    assert norms(Late()) == norms(Only())
    assert norms(Late()) != norms(gs.Always())


def test_a_group_with_a_state_must_keep_its_members() -> None:
    model = small()
    optimizer = sgd(model)
    transform = gs.NormMatched(gs.Chain(gs.GrokfastEMA(), gs.ClipGlobalNorm(1.0)))

    class First(gs.Trigger):
        def fires(self, context: TriggerContext) -> Decision:
            return None if context.site is None else not context.step or "bias" in context.site

    with (
        pytest.raises(RuntimeError, match=r"members must stay the same: at first .*, now "),
        attached(model, transform, None, optimizer, First()),
    ):
        train(model, optimizer, 2)
