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
from gradsurg.sites.parameters import Parameters
from gradsurg.sources import watch
from gradsurg.transforms.base import State, Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Clock, Trigger
from gradsurg.triggers.epochs import Epochs
from gradsurg.triggers.flag import Flag

FORWARD = ("forward", "step")  # what passes outside a backward can be written to at once


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
        self.clock.step += 1
        self.effects.begin(self.clock.step)
        for attached in self._attached:
            attached.begin()

    def next_epoch(self) -> None:
        """One epoch is done, where no `steps_per_epoch` tells."""
        self.clock.counted_epochs += 1
        for attached in self._attached:
            attached.operation.begin()

    def switch(self, flag: str, *, on: bool) -> None:
        """Flip the switch of `Flag(flag)`. Raises LookupError if no trigger asks for it."""
        if flag not in self.clock.flags:
            raise LookupError(f"no Flag '{flag}'. {nearest(flag, list(self.clock.flags))}")
        self.clock.flags[flag] = on

    def add(self, intervention: Intervention) -> str:
        """Attach one more, from the next backward on; its label, for `remove` and `set`.

        What is wrong with it is told now. Inside a backward it waits until that has ended.
        """
        attached = self._admit(intervention)
        _soon(lambda: self._hook(attached))
        return attached.label

    def remove(self, label: str) -> None:
        """Detach the intervention of this label, from the next backward on.

        Raises LookupError, with the labels there are.
        """
        attached = self._find(label)
        if label != attached.label:
            raise LookupError(f"'{label}' is a link of '{attached.label}': remove the whole")

        def remove() -> None:
            if attached in self._attached:
                self._attached.remove(attached)
                attached.close()

        _soon(remove)

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or `when` it acts, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. Its state is
        kept. Raises LookupError for a label that is not there, ValueError for a wrong field, and
        for a transform or a trigger that could not act there.
        """
        attached = self._find(label)
        old = attached.intervention
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
        self._check(new)

        def change() -> None:
            attached.change(new)
            self._watch(attached)

        _soon(change)

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

    def _check(self, intervention: Intervention) -> None:
        check_scaled(intervention, self._patient.scaler)
        check_pattern(intervention, self._patient.model)
        intervention.at.find(self._patient.model)

    def _hook(self, attached: "Attached") -> None:
        """Hook all its sites, or none of them."""
        model, at = self._patient.model, attached.intervention.at
        if any(isinstance(kind, Parameters) for kind in at.kinds):
            self._params |= {name: ref(param) for name, param in model.named_parameters()}
        attached.operation.begin()
        with ExitStack() as stack:
            self._watch(attached)
            attached.hook(self._patient, stack)
            attached.stack.push(stack.pop_all().__exit__)

    def _watch(self, attached: "Attached") -> None:
        """Let its trigger see what it looks at, and know the switches that it asks for."""
        trigger = attached.intervention.when
        for part in trigger.parts:
            if isinstance(part, Flag):
                self.clock.flags.setdefault(part.flag, part.on)
        watch(trigger, self._patient.model, self.clock, attached.stack)

    def _find(self, label: str) -> "Attached":
        for attached in self._attached:
            if label in (attached.label, *attached.labels):
                return attached
        names = [attached.label for attached in self._attached]
        raise LookupError(f"there is no intervention '{label}'. {nearest(label, names)}")

    def _refresh(self) -> None:
        """States were loaded: the gates take them up."""
        for attached in self._attached:
            attached.refresh(self._states)

    def _close(self) -> None:
        """Take all hooks off; those on graphs that are already built pass from now on."""
        with ExitStack() as stack:
            for attached in self._attached:
                stack.callback(attached.close)
        self._held = None
        self._params = {}

    def _complaints(self) -> list[str]:
        said = self.ledger.complaints()
        met = {entry.intervention for entry in self.ledger}
        said += [
            f"{attached.label}: attached, but none of its sites was met: was the model called?"
            for attached in self._attached
            if attached.label not in met
        ]
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
        parts = {part for item in self.interventions for part in item.when.parts}
        timed = {type(part).__name__ for part in parts if part.clocked}
        if timed and self.step == self._began[0]:
            yield (
                f"{', '.join(sorted(timed))}: no optimizer step was counted; "
                "attach(model, optimizer) or call live.tick() after each step"
            )
        told = self.clock.epoch_length or self.clock.counted_epochs > self._began[1]
        if any(isinstance(part, Epochs) and part.length is None for part in parts) and not told:
            yield (
                "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, "
                "or call live.next_epoch()"
            )


class Attached:
    """One intervention in place: its gates, made as its selector asks for them, and its hooks."""

    def __init__(self, intervention: Intervention, operation: Operation, ledger: Ledger) -> None:
        self.intervention = intervention
        self.operation = operation
        self.ledger = ledger
        self.label = operation.label
        self.labels = tuple(label for label, _ in operation.links)
        self._keeps = intervention.at.keeper()
        self.stack = ExitStack()
        self.notes: list[str] = []
        self._sum_matters = sum_matters(intervention)
        self._made: dict[str, Gate] = {}

    @property
    def needs_value(self) -> bool:
        """Whether its transform or its trigger looks at the tensor whose gradient passes."""
        return self.operation.needs_value

    def hook(self, patient: Patient, stack: ExitStack) -> None:
        """Hook all that its selector selects."""
        item = self.intervention
        scope = item.operator.scope
        item.at.hook(patient.model, patient.optimizer, item.stage, scope, self, stack)
        if item.at.expected is not None:
            if all(kind.known_at_once for kind in item.at.kinds):
                self._count()
            else:
                handle = patient.model.register_forward_hook(self._count_once(stack))
                stack.callback(handle.remove)

    def change(self, intervention: Intervention) -> None:
        """Another transform of the same links, or another trigger, in the same places."""
        self.intervention = intervention
        links = list(zip(self.labels, intervention.links, strict=True))
        self.operation.set(links, intervention.when)
        for gate in self._made.values():
            gate.renew()

    def refresh(self, states: dict[str, State]) -> None:
        """Take up states that were loaded."""
        for gate in self._made.values():
            gate.refresh(states)

    def close(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.operation.retire()
        self._made = {}
        self.stack.close()

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

    def _count_once(self, stack: ExitStack) -> Callable[..., None]:
        counted = False

        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            nonlocal counted
            if not counted and torch.is_grad_enabled() and not engine.in_backward():
                counted = True
                self._count()

        return hook

    def _count(self) -> None:
        own = [entry for entry in self.ledger if entry.intervention == self.label]
        sites = [entry.site for entry in own if not entry.skipped]
        expected = self.intervention.at.expected
        if len(sites) != expected:
            raise LookupError(
                f"{self.label}: {expected} sites were expected, found {len(sites)}: "
                f"{', '.join(sites) or 'none'}"
            )


def _soon(action: Callable[[], None]) -> None:
    """Now, or when the backward at hand has ended."""
    if engine.in_backward():
        engine.at_end_of_backward(action)
    else:
        action()


def _changed(link: Transform, label: str, changes: dict[str, object]) -> Transform:
    known = [field.name for field in fields(link)] if hasattr(link, "__dataclass_fields__") else []  # pyright: ignore[reportArgumentType]
    wrong = [
        (key, f"is not a field here. {nearest(key, known)}") for key in changes if key not in known
    ]
    if wrong:
        raise FieldError(label, wrong)
    return replace(link, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
