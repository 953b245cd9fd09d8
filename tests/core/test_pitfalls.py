"""Pitfalls are explained by examples that run, and tell what they see of an attached surgery."""

import copy
import doctest
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.core.attachment import Attachment
from gradsurg.core.intervention import Intervention
from gradsurg.core.pitfalls import PITFALLS, Pitfall
from gradsurg.core.pitfalls.accumulation import PartsOfASum
from gradsurg.core.pitfalls.checkpoints import SecondCalls
from gradsurg.core.pitfalls.compiled import OtherCode
from gradsurg.core.pitfalls.ddp import BeforeAverage
from gradsurg.core.pitfalls.discarded_hooks import DiscardedHooks
from gradsurg.core.pitfalls.loss_scale import LossScale
from gradsurg.core.pitfalls.nan_states import NanStates
from gradsurg.core.pitfalls.never_called import NeverCalled
from gradsurg.core.pitfalls.optimizer_steps import StepHooks
from gradsurg.core.pitfalls.replaced import Replaced
from gradsurg.core.pitfalls.two_surgeries import TwoSurgeries
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Entry, Ledger
from gradsurg.sites.places import Selector
from gradsurg.sites.selectors import params_of
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.triggers.base import Clock
from tests.nets import small
from tests.sites.points import recomputed

KNOWN = {
    each.__name__: each
    for each in (
        *(Thread, checkpoint, partial, allreduce_hook, fully_shard),
        *(init_device_mesh, DistributedDataParallel),
    )
}
"""The names that an example may use besides `torch`, `nn` and `copy`."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:For backward hooks to be called, module output should be")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("pitfall", PITFALLS)
def test_the_example_of_a_pitfall_runs(pitfall: type[Pitfall]) -> None:
    torch.compiler.reset()
    names = {"torch": torch, "nn": nn, "copy": copy, **KNOWN}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    test = doctest.DocTestParser().get_doctest(
        pitfall.__doc__ or "", names, pitfall.__name__, None, None
    )
    assert test.examples
    told: list[str] = []
    runner.run(test, out=told.append, clear_globs=False)  # compiled code refers to them
    assert not told, "".join(told)


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_a_pitfall_is_explained_and_has_an_outcome(pitfall: type[Pitfall]) -> None:
    assert pitfall.__doc__
    assert sys.modules[pitfall.__module__].__doc__
    assert pitfall.cells
    for cell in pitfall.cells:
        assert cell.context
        assert cell.kinds
        assert cell.text
        # PyTorch itself raises the error of one of them.
        is_of_pytorch = (cell.context, cell.kinds) == ("checkpoint, reentrant", "Captured")
        assert (cell.outcome == "n/a") == is_of_pytorch


CLIP, SCALE = gs.Intervention(gs.Clip(1.0)), gs.Intervention(gs.Scale(2.0))


@dataclass(eq=False)
class Operation:
    """An attached intervention, with hooks that have seen `calls` gradients in this step."""

    intervention: Intervention
    calls: dict[str, int] = field(default_factory=dict)
    has_several_tasks: bool = False
    answer: bool | None = True

    def __post_init__(self) -> None:
        self.stage, self.label, self.labels = self.intervention.stage, "f", ("f",)
        self.hooks = {site: self._hook(site, calls) for site, calls in self.calls.items()}
        self.notes: list[str] = []
        self.note = self.notes.append

    def _hook(self, site: str, calls: int) -> Any:
        context = SimpleNamespace(call=calls - 1, step=-1)
        return SimpleNamespace(operation=self, entry=Entry("f", site), contexts=[context])


class Surgery:
    """An attachment: `told` are the warnings that were emitted at once."""

    def __init__(self, *operations: Operation, model: nn.Module | None = None) -> None:
        self.operations, self.model = operations, model or small()
        self.clock, self.ledger, self.steps = Clock(), Ledger(), OptimizerSteps()
        self.first_step, self.states = 0, dict[str, Any]()
        self.shadow, self.is_compiled, self.processes, self.scaler = False, False, 2, None
        self.told: dict[str, str] = {}
        self.at_first_steps: list[Callable[[], None]] = []
        self.listening: list[Any] = []  # Any: pitfalls

    params_of = staticmethod(params_of)

    def enter_unmet(self) -> None:
        """All sites were met."""

    def tell(self, moment: str) -> None:
        for pitfall in self.listening:
            for text in getattr(pitfall, moment)(self) or ():
                self.warn_once(text)

    def warn_unknown_scaler(self) -> None:
        """There are no aggregators."""

    def warn_once(self, text: str, key: str = "") -> None:
        self.told.setdefault(key or text, text)


def texts(told: Iterable[str] | None) -> str:
    return "\n".join(told or ())


@pytest.mark.parametrize(
    ("operation", "is_told"),
    [
        (Operation(CLIP, {"a": 1, "b": 3}), True),
        (Operation(SCALE, {"a": 1, "b": 3}), False),
        (Operation(CLIP, {"a": 1, "b": 3}, has_several_tasks=True), False),
    ],
)
def test_several_gradients_in_a_step_are_told_of_the_site_that_had_most(
    operation: Operation, is_told: bool
) -> None:
    surgery, pitfall = Surgery(operation), PartsOfASum()
    for call in (1, 2):
        pitfall.further_gradient(surgery, operation.hooks["b"], call)
    assert not surgery.told
    pitfall.step_ended(surgery)
    assert [*surgery.told] == ["f acts on parts"] * is_told
    assert all(
        "'b' had 3 gradients in one optimizer step" in text for text in surgery.told.values()
    )
    surgery.told.clear()
    pitfall.step_ended(surgery)
    assert not surgery.told


@pytest.mark.parametrize(
    ("item", "reentrant", "is_told"),
    [(CLIP, True, True), (CLIP, False, False), (SCALE, True, False)],
)
def test_passes_of_reentrant_checkpoints_are_told(
    item: Intervention, reentrant: bool, is_told: bool
) -> None:
    layer, x = nn.Linear(1, 1), torch.ones(1, 1, requires_grad=True)
    operation = Operation(item, {"weight": 1})
    surgery, pitfall, calls = Surgery(operation, model=layer), SecondCalls(), []
    pitfall.attached(surgery)

    def see(grad: torch.Tensor) -> None:
        calls.append(None)
        if calls[1:]:
            pitfall.further_gradient(surgery, operation.hooks["weight"], len(calls) - 1)
        else:
            pitfall.first_gradient(surgery, operation.hooks["weight"])

    layer.weight.register_hook(see)
    sum(recomputed(layer, x, reentrant) for _ in range(2)).backward()
    assert len(calls) == 1 + reentrant
    assert [*surgery.told] == ["f acts on parts"] * is_told
    assert is_told == ("one in each reentrant checkpoint" in texts(surgery.told.values()))


def test_the_same_intervention_in_two_open_surgeries_is_told_once() -> None:
    model = small()
    made = [Surgery(Operation(CLIP, {"a": 1}), model=model) for _ in range(2)]
    other = Surgery(Operation(SCALE, {"a": 1}), model=model)
    pitfalls = [TwoSurgeries() for _ in (*made, other)]
    for pitfall, surgery in zip(pitfalls, (*made, other), strict=True):
        pitfall.attached(surgery)
    first, second = (each.operations[0].hooks["a"] for each in made)
    told = [texts(pitfalls[0].first_gradient(made[0], first))]
    first.entry.fired = second.entry.fired = 1
    told.append(texts(pitfalls[2].first_gradient(other, other.operations[0].hooks["a"])))
    told.append(texts(pitfalls[1].first_gradient(made[1], second)))
    told.append(texts(pitfalls[0].first_gradient(made[0], first)))
    for pitfall in pitfalls:
        pitfall.stack.close()
    assert [bool(text) for text in told] == [False, False, True, False]
    assert told[2].startswith("f: two surgeries with this")


def test_a_closed_surgery_is_no_second_one() -> None:
    model = small()
    one, two = (Surgery(Operation(CLIP, {"a": 1}), model=model) for _ in range(2))
    first, second = TwoSurgeries(), TwoSurgeries()
    first.attached(one)
    second.attached(two)
    one.operations[0].hooks["a"].entry.fired = 1
    first.stack.close()
    assert not texts(second.first_gradient(two, two.operations[0].hooks["a"]))
    second.stack.close()


def test_discarded_hooks_are_told_where_no_hook_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    # C++ code of experiments/hooks_tour does so; here the probe stands in for a compiler.
    monkeypatch.setattr("gradsurg.torch_internals.autograd.without_hooks", list)
    late = gs.Intervention(gs.Clip(1.0), gs.Parameters(stage="accumulated"))
    sites = {"first.weight": 1, "first.bias": 1, "last.bias": 1, "first#0": 1}
    surgery, pitfall = Surgery(Operation(CLIP, sites), Operation(late, sites)), DiscardedHooks()
    assert texts(pitfall.closed(surgery)) == ""  # there is no gradient
    surgery.operations[0].hooks["last.bias"].contexts[0].step = 1
    surgery.clock.step = 2
    told = texts(pitfall.first_steps_ended(surgery))
    assert told.startswith("f: C++ code has registered a hook on first.weight, first.bias, which")
    assert "\n" not in told
    assert texts(pitfall.closed(surgery)) == told
    surgery.clock.step = 3
    assert "last.bias" in texts(pitfall.closed(surgery))


def test_discarded_hooks_are_told_of_gradients_where_no_step_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradsurg.torch_internals.autograd.without_hooks", list)
    surgery, pitfall = (
        Surgery(Operation(CLIP, {"first.weight": 1, "first.bias": 1})),
        DiscardedHooks(),
    )
    surgery.model.first.bias.grad = torch.zeros(5)
    assert "registered a hook on first.bias, which" in texts(pitfall.closed(surgery))


def test_a_nan_in_a_state_is_told_with_its_site() -> None:
    surgery = Surgery(Operation(CLIP))
    nan, one = torch.tensor([1.0, float("nan")]), torch.ones(1)
    surgery.states = {
        "f/a": {"mean": one},
        "f/b": {"mean": one, "square": nan},
        "f/c": {"mean": nan},
        "f/d/when": {"mean": nan},
        "g/e": {"mean": nan},
    }
    expected = (
        "f: put Sanitize before Clip, to remove NaN from its gradients: the state of Clip at b and "
        "1 more holds a NaN, seen at step 0"
    )
    assert texts(NanStates().closed(surgery)) == expected


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_around", [True, False])
def test_acting_before_the_average_of_several_processes_is_noted(
    monkeypatch: pytest.MonkeyPatch, is_around: bool
) -> None:
    inner = nn.Linear(1, 1)
    wrapper, operations = DistributedDataParallel(inner), (Operation(CLIP), Operation(SCALE))
    model = inner if is_around else nn.Sequential(wrapper)
    surgery, pitfall = Surgery(*operations, model=model), BeforeAverage()
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 3)
    pitfall.attached(surgery)
    assert bool(operations[0].notes) != is_around
    wrapper(torch.ones(1, 1))
    assert "each of 3 processes" in operations[0].notes[0]
    assert not operations[1].notes


def _grow(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.ones(5, 6))


def _thaw(model: nn.Module) -> None:
    model.last.requires_grad_(True)


def _shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def _nothing(model: nn.Module) -> None:
    first, model.first = model.first, nn.Linear(1, 1)
    model.first = first
    model.last = torch.compile(model.last, backend="eager")


PARAMETERS, OUTPUTS = gs.Parameters(stage="backward"), gs.Outputs("last*")
HEAD = gs.Parameters("first.*", stage="backward")


@pytest.mark.parametrize(
    ("query", "change", "found"),
    [
        (PARAMETERS, _nothing, ""),
        (OUTPUTS, _nothing, ""),
        (PARAMETERS, _grow, "parameters were replaced, added or unfrozen .*: first.weight\\."),
        (PARAMETERS, _thaw, "unfrozen .*: last.weight, last.bias\\."),
        (HEAD, _thaw, ""),
        (OUTPUTS, lambda model: setattr(model, "last", nn.Linear(5, 3)), "modules .*: last\\."),
        (OUTPUTS, lambda model: setattr(model, "other", nn.Linear(5, 3)), ""),
        (gs.Nodes("Relu"), lambda model: model.append(nn.ReLU()), "have no hooks: 3\\."),
        (
            PARAMETERS,
            _shard,
            "unfrozen in .* no hooks, for example after fully_shard: first.weight, ",
        ),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_selected_modules_and_parameters_that_came_later_are_told(
    query: Selector, change: Callable[[nn.Module], object], found: str
) -> None:
    model = small()
    model.last.requires_grad_(False)
    surgery, pitfall = Attachment(model, Effects(1)), Replaced()
    surgery.add(gs.Intervention(gs.Clip(1.0), at=query))
    pitfall.attached(surgery)  # type: ignore[arg-type]
    change(model)
    told = texts(pitfall.closed(surgery))  # type: ignore[arg-type]
    surgery.close()
    assert re.search(found, told) if found else not told


EPOCHS = gs.Intervention(gs.Clip(1.0), when=gs.Epochs(stop=2))
STEPS = gs.Intervention(gs.Clip(1.0), when=gs.Steps(stop=2))


@pytest.mark.parametrize(
    ("item", "steps", "epochs", "told"),
    [
        (STEPS, 0, 0, "Steps: no optimizer step was counted since this block began, at step 5."),
        (STEPS, 1, 0, ""),
        (EPOCHS, 0, 0, "Epochs: no epoch was counted."),
        (EPOCHS, 0, 1, ""),
        (CLIP, 0, 0, ""),
    ],
)
def test_a_trigger_whose_clock_stands_still_is_told(
    item: Intervention, steps: int, epochs: int, told: str
) -> None:
    surgery, pitfall = Surgery(Operation(item)), StepHooks()
    surgery.first_step = surgery.clock.step = 5
    surgery.clock.counted_epochs = 3
    pitfall.attached(surgery)
    surgery.clock.step += steps
    surgery.clock.counted_epochs += epochs
    assert "was counted" not in texts(pitfall.closed(surgery))  # nothing has passed
    surgery.ledger.enter("f", "a").fired = 1
    found = texts(pitfall.closed(surgery))
    assert found.startswith(told) if told else not found


@pytest.mark.parametrize("is_given", [True, False])
def test_a_grad_scaler_that_attach_was_not_told_of_is_noticed_in_the_first_step(
    is_given: bool,
) -> None:
    surgery, pitfall, told = Surgery(Operation(SCALE), Operation(CLIP)), LossScale(), []
    optimizer = torch.optim.SGD(surgery.model.parameters())
    optimizer.register_step_post_hook(lambda *_: told.append(texts(pitfall.step_ended(surgery))))
    scaler = torch.amp.GradScaler("cpu")
    surgery.scaler = scaler if is_given else None
    scaler.scale(surgery.model(torch.ones(1, 6)).sum()).backward()
    scaler.step(optimizer)
    assert surgery.scaler is scaler
    assert pitfall.done == {"step_ended"}  # the call stack is searched in the first step alone
    assert (
        told[0].startswith(
            "f: attach was not given the GradScaler: attach(.., scaler=scaler). Clip("
        )
        != is_given
    )


def _steps(surgery: Surgery, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        surgery.model(torch.ones(1, 6)).sum().backward()
        optimizer.step()


def _unused(*operations: Operation) -> tuple[Surgery, StepHooks, torch.optim.Optimizer]:
    """Return a surgery at a site that sees no gradient, its watch, and an optimizer."""
    surgery, watch, silent = Surgery(*operations), StepHooks(), NeverCalled()
    surgery.ledger.enter("f", "unused")
    surgery.listening = [silent]
    watch.attached(surgery)
    silent.attached(surgery)
    return surgery, watch, torch.optim.SGD(surgery.model.parameters(), 0.1)


def _silent(surgery: Surgery) -> str:
    return texts(surgery.listening[0].closed(surgery))


def test_sites_without_a_gradient_are_told_after_two_counted_steps() -> None:
    surgery, watch, optimizer = _unused(Operation(STEPS))
    surgery.steps.bind(optimizer)
    optimizer.register_step_post_hook(lambda *_: watch.step_ended(surgery))
    _steps(surgery, optimizer, 1)
    assert not surgery.told
    _steps(surgery, optimizer, 3)
    assert [*surgery.told] == ["f silent"]
    assert surgery.told["f silent"].endswith(
        "no gradient passed at unused in the first steps. Does the loss depend on it?"
    )
    assert _silent(surgery).startswith("f: attached, but no gradient ever passed at")
    surgery.steps.close()


def test_steps_that_are_not_counted_are_seen_by_the_parameters() -> None:
    surgery, _, optimizer = _unused(Operation(STEPS))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    surgery.steps.bind(other)
    _steps(surgery, optimizer, 2)
    assert not surgery.told
    _steps(surgery, optimizer, 2)
    keys = [*surgery.told]
    assert keys[:2] == ["no step", "f silent"]
    assert surgery.told["no step"].startswith("no step of SGD was counted, though the weights")
    assert keys[2].startswith("Steps: no optimizer step was counted. Use attach(model, optimizer)")
    assert not any(param._post_accumulate_grad_hooks for param in surgery.model.parameters())
    surgery.steps.close()


def test_a_site_that_has_acted_and_a_trigger_that_waits_are_not_told() -> None:
    surgery, watch, _ = _unused(Operation(CLIP))
    surgery.ledger.enter("f", "used").fired = 1
    late = Operation(CLIP, answer=False)
    late.label = "late"
    surgery.operations = (*surgery.operations, late)
    for _ in range(2):
        watch.step_ended(surgery)
    assert not surgery.told
    assert _silent(surgery).startswith("f: attached, but no gradient ever passed at")


def test_what_is_watched_is_released_with_the_stack() -> None:
    surgery, pitfall, _ = _unused(Operation(CLIP))
    watched = [param for param in surgery.model.parameters() if param._post_accumulate_grad_hooks]
    assert watched
    pitfall.stack.close()
    assert not any(param._post_accumulate_grad_hooks for param in watched)


def test_code_that_was_compiled_before_is_named_as_the_reason() -> None:
    model = nn.Sequential(small())
    assert OtherCode.reason(model, is_compiled=False, has_acted=True) == ""
    assert "Was the model compiled" in OtherCode.reason(model, is_compiled=True, has_acted=True)
    assert "Was the model compiled" in OtherCode.reason(model, is_compiled=False, has_acted=False)
    model[0] = torch.compile(model[0], backend="eager")
    reason = OtherCode.reason(model, False, has_acted=True)
    assert reason.startswith(". Compiled before attaching: '0'. Attach before its first call")
