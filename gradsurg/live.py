"""A surgery while it is attached."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg import engine
from gradsurg.effects import Effects
from gradsurg.fields import FieldError, nearest
from gradsurg.gate import Gate, Operation
from gradsurg.group_gate import GroupGate
from gradsurg.intervention import (
    Intervention,
    check_pattern,
    check_scaled,
    labels_of,
    sum_matters,
)
from gradsurg.ledger import Entry, Ledger, SurgeryWarning
from gradsurg.sites.base import GroupFn, Place, SiteGate
from gradsurg.sources import watch, watched
from gradsurg.transforms.base import State, Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Clock, Sourced, Trigger
from gradsurg.triggers.epochs import Epochs
from gradsurg.triggers.flag import Flag

# What passes outside a backward can be written to at once.
FORWARD = ("forward", "step", "captured")


@dataclass(frozen=True)
class Patient:
    """What a surgery is attached to."""

    model: nn.Module
    optimizer: Optimizer | None
    scaler: torch.amp.GradScaler | None


class Live:
    """A surgery while it is attached: its effects, its ledger, its clock, its interventions."""

    def __init__(
        self,
        patient: Patient,
        effects: Effects,
        shadow: bool,
        clock: Clock,
        states: dict[str, State],
        seed: int,
    ) -> None:
        self.effects = effects
        self.ledger = Ledger()
        self.shadow = shadow
        self.clock = clock
        self._held: Patient | None = patient
        self._states = states
        self._seed = seed
        self._attached: list[Attached] = []
        self._notes: list[str] = []  # of interventions that were removed
        self._waiting: list[Callable[[], None]] = []  # for the backward at hand to end
        self._alarm = ExitStack()  # the hook that ends the waiting where the backward has failed
        self._began = clock.step, clock.counted_epochs
        self._params: dict[str, ref[nn.Parameter]] = {}
        effects.begin(clock.step)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def _patient(self) -> Patient:
        if self._held is None:
            raise RuntimeError("the block has ended, and with it the surgery: attach it again")
        return self._held

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What is attached now, in order."""
        return tuple(attached.intervention for attached in self._attached)

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every link of every intervention."""
        return tuple(attached.labels for attached in self._attached)

    def tick(self) -> None:
        """One optimizer step is done; called by the optimizer's own hook where one was given."""
        self._settle()
        self.clock.step += 1
        self.effects.begin(self.clock.step)
        for attached in self._attached:
            attached.begin()

    def next_epoch(self) -> None:
        """One epoch is done. Raises RuntimeError where `steps_per_epoch` tells that already."""
        if self.clock.epoch_length is not None:
            raise RuntimeError(
                f"epochs are counted already: steps_per_epoch={self.clock.epoch_length}"
            )
        self.clock.counted_epochs += 1
        for attached in self._attached:
            attached.operation.begin()

    def switch(self, flag: str, *, on: bool) -> None:
        """Flip the switch of `Flag(flag)`, from any thread, at once.

        Raises LookupError if no trigger asks for it.
        """
        _ = self._patient
        flags = list(dict.fromkeys(part.flag for own in self._attached for part in own.flags))
        if flag not in flags:
            raise LookupError(f"no trigger asks for a Flag '{flag}'. {nearest(flag, flags)}")
        if not isinstance(on, bool):
            raise TypeError(f"on: must be True or False, found {on!r}")
        self.clock.flags[flag] = on

    def add(self, intervention: Intervention) -> str:
        """Attach one more, from the next backward on; its label, for `remove` and `set`.

        What hooks tensors in the forward, as Outputs do, and what looks at the batch acts from the
        next forward on. Inside a backward it waits until that has ended. What is wrong with it is
        told now, but for what only hooking can show, and then nothing of it is left.
        """
        attached = self._admit(intervention)
        self._soon(lambda: self._hook(attached))
        return attached.label

    def remove(self, label: str) -> None:
        """Detach the intervention of this label, from the next backward on, and drop its state.

        Raises LookupError, with the labels there are.
        """
        attached = self._find(label)
        if label != attached.label:
            raise LookupError(f"'{label}' is a link of '{attached.label}': remove the whole")
        self._soon(lambda: self._dismiss(attached))

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or `when` it acts, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform's
        state is kept, the memory of a trigger that is replaced is not. Raises LookupError for a
        label that is not there, ValueError for a wrong field, and for a transform or a trigger that
        could not act there.
        """
        attached = self._find(label)
        if when is None and not changes:
            raise ValueError(f"'{label}': nothing to change was given, no field and no `when`")
        old = attached.wanted
        links = [
            _changed(link, label, changes) if name == label and changes else link
            for name, link in zip(attached.labels, old.links, strict=True)
        ]
        if changes and label not in attached.labels:
            raise LookupError(f"'{label}' has several links: {', '.join(attached.labels)}")
        if when is not None and not isinstance(when, Trigger):
            raise TypeError(f"when: must be a trigger, as Steps(stop=100), found {when!r}")
        transform = old.operator
        if changes:
            transform = Chain(*links) if isinstance(transform, Chain) else links[0]
        new = Intervention(transform, old.at, when or old.when, old.names)
        if (new.stage, new.operator.scope) != (old.stage, old.operator.scope):
            raise ValueError(
                f"'{label}' is hooked at stage '{old.stage}' for a {old.operator.scope}, and would "
                f"act at stage '{new.stage}' for a {new.operator.scope}: remove it and add another"
            )
        self._check(new, attached)
        attached.wanted = new
        self._soon(lambda: self._change(attached, new))

    def _admit(self, intervention: Intervention) -> "Attached":
        """Make room for an intervention, with its label; nothing is hooked yet."""
        if not isinstance(intervention, Intervention):
            raise TypeError(f"a surgery takes Interventions, found {intervention!r}")
        self._check(intervention)
        taken = {label for labels in self.labels for label in labels}
        operation = Operation(
            links=list(zip(labels_of(intervention, taken), intervention.links, strict=True)),
            trigger=intervention.when,
            effects=self.effects,
            states=self._states,
            clock=self.clock,
            seed=self._seed,
            shadow=self.shadow,
            stepping=self._patient.optimizer is not None,
            at_once=intervention.stage in FORWARD,
        )
        attached = Attached(intervention, operation, self.ledger)
        self._attached.append(attached)
        return attached

    def _check(self, intervention: Intervention, instead: "Attached | None" = None) -> None:
        """Refuse what could not act; `instead` is the one whose place it takes."""
        check_scaled(intervention, self._patient.scaler)
        check_pattern(intervention, self._patient.model)
        intervention.at.find(self._patient.model)
        watched(intervention.when, self._patient.model)
        others = [part for own in self._attached if own is not instead for part in own.flags]
        check_flags([*others, *flags_of(intervention)])

    def _hook(self, attached: "Attached") -> None:
        """Hook all its sites, or none of them."""
        model, at = self._patient.model, attached.intervention.at
        if any(kind.known_at_once for kind in at.kinds):
            self._params |= {name: ref(param) for name, param in model.named_parameters()}
        with ExitStack() as undo:
            undo.callback(self._dismiss, attached)
            self._watch(attached)
            attached.operation.begin()
            attached.hook(self._patient)
            undo.pop_all()

    def _change(self, attached: "Attached", new: Intervention) -> None:
        if attached not in self._attached:
            return
        old = attached.intervention
        attached.change(new)
        if new.when is not old.when:
            attached.forget_memory()
            attached.eyes.close()
            self._unsee(old.when)
            self._watch(attached)

    def _dismiss(self, attached: "Attached") -> None:
        """Take an intervention off and out, with all that only it has needed."""
        if attached not in self._attached:
            return
        self._attached.remove(attached)
        self._notes += attached.notes
        attached.close()
        attached.forget_states()
        self._unsee(attached.intervention.when)
        for entry in [entry for entry in self.ledger if entry.intervention == attached.label]:
            self.ledger.forget(entry.intervention, entry.site)

    def _watch(self, attached: "Attached") -> None:
        """Let its trigger see what it looks at, and know the switches that it asks for."""
        for flag in flags_of(attached.intervention):
            self.clock.flags.setdefault(flag.flag, flag.on)
        watch(attached.intervention.when, self._patient.model, self.clock, attached.eyes)

    def _unsee(self, trigger: Trigger) -> None:
        """Forget what a trigger has seen, unless another intervention has the same."""
        others = [part for own in self._attached for part in own.intervention.when.parts]
        for part in trigger.parts:
            if isinstance(part, Sourced) and part not in others:
                self.clock.seen.pop(part, None)

    def _soon(self, action: Callable[[], None]) -> None:
        """Now, or when the backward at hand has ended."""
        self._settle()
        if not engine.in_backward():
            action()
            return
        if not self._waiting:
            # At the latest before the next forward: a backward that fails has no end to wait for.
            hook = self._patient.model.register_forward_pre_hook(lambda *_: self._settle())
            self._alarm.callback(hook.remove)
        self._waiting.append(action)
        engine.at_end_of_backward(self._at_end)

    def _at_end(self) -> None:
        if not engine.in_inner_backward():
            self._settle(ended=True)

    def _settle(self, ended: bool = False) -> None:
        """Do what has waited for the end of a backward."""
        if not self._waiting or (engine.in_backward() and not ended):
            return
        self._alarm.close()
        while self._waiting:
            self._waiting.pop(0)()

    def _find(self, label: str) -> "Attached":
        _ = self._patient
        self._settle()
        for attached in self._attached:
            if label in (attached.label, *attached.labels):
                return attached
        names = [attached.label for attached in self._attached]
        raise LookupError(f"there is no intervention '{label}'. {nearest(label, names)}")

    def _refresh(self) -> None:
        """States were loaded, and a step with them: the gates take them up."""
        self.effects.begin(self.clock.step)
        for attached in self._attached:
            attached.refresh(self._states)

    def _close(self) -> None:
        """Take all hooks off; those on graphs that are already built pass from now on."""
        self._held = None
        with ExitStack() as stack:
            for attached in self._attached:
                stack.callback(attached.close)
            stack.callback(self._alarm.close)
        self._waiting = []
        self._params = {}
        self.clock.seen.clear()
        self.ledger.settle()
        self.effects.close()

    def _complaints(self) -> list[str]:
        self._settle()
        said = self.ledger.complaints()
        met = {entry.intervention for entry in self.ledger}
        said += [
            f"{attached.label}: attached, but none of its sites was met: was the model called?"
            for attached in self._attached
            if attached.label not in met
        ]
        said += self._notes
        said += [note for attached in self._attached for note in attached.notes]
        said += self._idle_clocks()
        now = dict(self._patient.model.named_parameters())
        replaced = [name for name, held in self._params.items() if now.get(name) is not held()]
        if replaced:
            said.append(
                "parameters were replaced while the block was open, and what took their place is "
                f"not hooked: {', '.join(replaced)}; attach after replacing"
            )
        return said

    def _idle_clocks(self) -> Iterator[str]:
        """Triggers that read a clock which nobody has moved."""
        if not any(entry.calls for entry in self.ledger):
            return
        parts = [part for item in self.interventions for part in item.when.parts]
        epochs = [part for part in parts if isinstance(part, Epochs)]
        told = self.clock.epoch_length is not None
        timed = {type(part).__name__ for part in parts if part.clocked}
        timed |= {type(part).__name__ for part in epochs if told or part.length is not None}
        if timed and self.step == self._began[0]:
            yield (
                f"{', '.join(sorted(timed))}: no optimizer step was counted; "
                "attach(model, optimizer) or call live.tick() after each step"
            )
        told = told or self.clock.counted_epochs > self._began[1]
        if any(part.length is None for part in epochs) and not told:
            yield (
                "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, "
                "or call live.next_epoch()"
            )


class Attached:
    """One intervention in place: its gates, made as its selector asks for them, and its hooks."""

    def __init__(self, intervention: Intervention, operation: Operation, ledger: Ledger) -> None:
        self.intervention = intervention
        self.wanted = intervention  # what it is to be once the backward at hand has ended
        self.operation = operation
        self.ledger = ledger
        self.label = operation.label
        self.labels = tuple(label for label, _ in operation.links)
        self._keeps = intervention.at.keeper()
        self.stack = ExitStack()
        self.eyes = ExitStack()  # the hooks by which its trigger sees a forward
        self.notes: list[str] = []
        self._sum_matters = sum_matters(intervention)
        self._made: dict[str, Gate] = {}

    @property
    def needs_value(self) -> bool:
        """Whether its transform or its trigger looks at the tensor whose gradient passes."""
        return self.operation.needs_value

    @property
    def stateful(self) -> str:
        """The first of its transforms and triggers that keeps a memory of each site."""
        for _, link in self.operation.links:
            if link.init(torch.zeros(1)):
                return repr(link)
        # What a trigger remembers is known once it has been asked.
        states = self.operation.states
        remembers = any(_is_of(key, self.label) and key.endswith("/when") for key in states)
        return repr(self.intervention.when) if remembers else ""

    @property
    def unsteady(self) -> str:
        """Why a tensor that passes twice may have two results."""
        operation = self.operation
        if self.stateful:
            return f"{self.stateful} remembers what it has met"
        for _, link in operation.links:
            if "deterministic" not in link.laws:
                return f"{link!r} is not known to draw no random numbers"
        for part in self.intervention.when.parts:
            if isinstance(part, Sourced) and part.source not in ("grad", "value"):
                return f"{part!r} looks at the newest forward"
        return ""

    @property
    def moment(self) -> object:
        """What else decides about a result: step, switches and fields as they are now."""
        item, clock = self.intervention, self.operation.clock
        return item.operator, item.when, clock.step, clock.epoch, tuple(clock.flags.items())

    @property
    def flags(self) -> list[Flag]:
        """The switches that its trigger asks for, or is to ask for."""
        return flags_of(self.intervention) + flags_of(self.wanted)

    def hook(self, patient: Patient) -> None:
        """Hook all that its selector selects."""
        item, stack = self.intervention, self.stack
        scope = item.operator.scope
        item.at.hook(patient.model, patient.optimizer, item.stage, scope, self, stack)
        if item.at.expected is not None:
            if all(kind.known_at_once for kind in item.at.kinds):
                self._count()
            else:
                handle = patient.model.register_forward_hook(self._count_once())
                stack.callback(handle.remove)

    def change(self, intervention: Intervention) -> None:
        """Another transform of the same links, or another trigger, in the same places."""
        if intervention.operator != self.intervention.operator:
            self._sum_matters = sum_matters(intervention)
        self.intervention = intervention
        links = list(zip(self.labels, intervention.links, strict=True))
        self.operation.set(links, intervention.when)
        for gate in self._made.values():
            gate.renew()

    def refresh(self, states: dict[str, State]) -> None:
        """Take up states that were loaded, at the step of the day."""
        self.operation.begin()
        for gate in self._made.values():
            gate.refresh(states)
            for context in gate.contexts:
                context.step, context.call = self.operation.step, 0

    def close(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.operation.retire()
        self._made = {}
        self.stack.close()
        self.eyes.close()

    def forget_memory(self) -> None:
        """Drop what its trigger has remembered at each site."""
        states = self.operation.states
        for key in [key for key in states if _is_of(key, self.label) and key.endswith("/when")]:
            del states[key]

    def forget_states(self) -> None:
        """Drop the states of its transforms too."""
        self.forget_memory()
        states = self.operation.states
        for key in [key for key in states if any(_is_of(key, label) for label in self.labels)]:
            del states[key]

    def keeps(self, place: Place) -> bool | None:
        return self._keeps(place)

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        self.ledger.enter(self.label, site, aliases, skipped, foreign)

    def forget(self, site: str) -> None:
        self.ledger.forget(self.label, site)

    def note(self, text: str) -> None:
        said = f"{self.label}: {text}"
        if said not in self.notes:
            self.notes.append(said)

    def gate(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteGate:
        gate = self._made.get(site)
        if gate is None:
            gate = Gate(self.operation, self._entry(site), value)
            self._made[site] = gate
        return gate.hook

    def group(self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]) -> GroupFn:
        gates = [
            Gate(self.operation, self._entry(site), value)
            for site, value in zip(sites, values, strict=True)
        ]
        self._made |= dict(zip(sites, gates, strict=True))
        return GroupGate(self.operation, gates)

    def begin(self) -> None:
        """A step begins; say once if the stage changed the transform's meaning in the last one."""
        operation = self.operation
        operation.begin()
        step, most, where = operation.step, 1, ""
        for site, gate in self._made.items():
            for context in gate.contexts:
                if context.call > most:
                    most, where = context.call, site
                context.step, context.call = step, 0
        if where and self._sum_matters:
            self._sum_matters = False
            warnings.warn(
                f"{self.label}: site '{where}' had {most} gradients in one optimizer step and the "
                "transform is not linear: acting on each is not acting on their sum. Use "
                "stage='step' for the sum.",
                SurgeryWarning,
                stacklevel=2,
            )

    def _entry(self, site: str) -> Entry:
        return self.ledger.enter(self.label, site)

    def _count_once(self) -> Callable[..., None]:
        counted = False

        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            nonlocal counted
            if not counted and torch.is_grad_enabled() and not engine.in_backward():
                counted = True
                self._count()

        return hook

    def _count(self) -> None:
        sites = list(self._made)
        expected = self.intervention.at.expected
        if len(sites) != expected:
            raise LookupError(
                f"{self.label}: {expected} sites were expected, found {len(sites)}: "
                f"{', '.join(sites) or 'none'}"
            )


def flags_of(intervention: Intervention) -> list[Flag]:
    """The switches that its trigger asks for."""
    return [part for part in intervention.when.parts if isinstance(part, Flag)]


def check_flags(flags: Sequence[Flag]) -> None:
    """Refuse a switch that would be both on and off at first."""
    first: dict[str, Flag] = {}
    for flag in flags:
        if first.setdefault(flag.flag, flag).on != flag.on:
            raise ValueError(f"{flag!r}: another trigger has this switch as on={not flag.on}")


def _is_of(key: str, label: str) -> bool:
    """Whether a state is that of a link, or of an intervention: no label has a slash."""
    return key.partition("/")[0] == label


def _changed(link: Transform, label: str, changes: dict[str, object]) -> Transform:
    known = [field.name for field in fields(link)] if hasattr(link, "__dataclass_fields__") else []  # pyright: ignore[reportArgumentType]
    wrong = [
        (key, f"is not a field here. {nearest(key, known)}") for key in changes if key not in known
    ]
    if wrong:
        raise FieldError(label, wrong)
    return replace(link, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
