"""A surgery while it is attached."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gradsurg import engine
from gradsurg.attached import Attached, Patient, check_flags, flags_of
from gradsurg.changes import Changes
from gradsurg.closing import complaints
from gradsurg.effects import Effects
from gradsurg.fields import nearest
from gradsurg.intervention import (
    Intervention,
    check_pattern,
    check_scaled,
    labels_of,
    scale_matters,
)
from gradsurg.ledger import Ledger, SurgeryWarning
from gradsurg.multitask.aggregation import Around
from gradsurg.multitask.conflict import Conflicts
from gradsurg.multitask.joint import Joint
from gradsurg.multitask.losses import Losses
from gradsurg.operation import Operation
from gradsurg.output_error import follow_error
from gradsurg.retuning import retuned
from gradsurg.sources import watch, watched
from gradsurg.transforms.base import State
from gradsurg.triggers.base import Clock, Sourced, Trigger
from gradsurg.triggers.flag import Flag

# What passes outside a backward can be written to at once; of a step all pass together.
FORWARD = ("forward", "captured")
# What is left where others may write to it: in `.grad`, or in a user's hands.
RESTING = ("accumulated", "settled", "backward_end", "step", *FORWARD)


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
        around = Around(effects, clock, states, self.ledger, seed, patient.scaler)
        self._joint = Joint(patient, around, shadow)
        self._changes = Changes(patient.model)
        self._first = True  # until a step was seen
        self._began = clock.step, clock.counted_epochs
        self._blind: Callable[[bool], str] = lambda acted: ""  # why no hook may have run
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
        own = (attached.intervention for attached in self._attached)
        return (*own, *(one.intervention for one in self._joint.aggregations))

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every link of every intervention."""
        own = (attached.labels for attached in self._attached)
        return (*own, *((one.label,) for one in self._joint.aggregations))

    @property
    def conflicts(self) -> Conflicts:
        """How far the tasks of `backward` conflict, at the measured steps."""
        return self._joint.around.conflicts

    def backward(self, losses: Losses, *, aggregate: bool = True) -> None:
        """In place of `sum(losses).backward()`: back from several losses, to one update.

        `losses` are tensors of no axes, by the names of their tasks or in an order. The gradients
        of the tasks flow one after the other, and the hooks in the model meet each of them;
        an aggregator makes one of them for each group of shared parameters, a parameter that one
        task alone reaches gets that of its task, and the results are added to `.grad`. Hooks of
        others on a parameter meet those of each task and then the result. An aggregator that weighs
        losses, as `Mean` does, has one backward of the weighed losses; with no aggregator it is one
        of their sum.

        With `aggregate=False` the gradients wait, and are added to those of the next call: several
        batches make one step so. With a GradScaler give scaled losses. Only parameters of the model
        and of the optimizer get gradients.

        Raises TypeError or ValueError for what is no loss, for losses that share no parameter, and
        for a transform that would remember the gradients of one task for the next.
        """
        _ = self._patient
        with self._changes.held():
            self._joint.backward(losses, self._attached, aggregate)

    def tick(self) -> None:
        """One optimizer step is done; called by the optimizer's own hook where one was given."""
        self._changes.settle()
        self._joint.stepped()
        if self._first:
            self._first = False
            self._notice_scaler()
        self.clock.step += 1
        self.clock.error = None
        self.effects.begin(self.clock.step)
        for attached in self._attached:
            attached.begin()
            attached.rest()

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
        parts = [part for own in self._attached for part in own.flags]
        parts += [part for one in self._joint.aggregations for part in flags_of(one.intervention)]
        flags = list(dict.fromkeys(part.flag for part in parts))
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
        self._changes.soon(lambda: self._hook(attached))
        return attached.label

    def remove(self, label: str) -> None:
        """Detach the intervention of this label, from the next backward on, and drop its state.

        Raises LookupError, with the labels there are.
        """
        attached = self._find(label)
        if label != attached.label:
            raise LookupError(f"'{label}' is a link of '{attached.label}': remove the whole")
        self._changes.soon(lambda: self._dismiss(attached))

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or `when` it acts, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform's
        state is kept, the memory of a trigger that is replaced is not. Raises LookupError for a
        label that is not there, ValueError for a wrong field, and for a transform or a trigger that
        could not act there.
        """
        attached = self._find(label)
        new = retuned(attached.wanted, attached.labels, label, when, changes)
        self._check(new, attached)
        attached.wanted = new
        self._changes.soon(lambda: self._change(attached, new))

    def _notice_scaler(self) -> None:
        """Say once if a GradScaler makes the steps that was not told, where that matters."""
        scaler = engine.stepping_scaler()
        if scaler is None or self._held is None or self._held.scaler is scaler:
            return
        self._held = replace(self._held, scaler=scaler)  # for what will be added
        self._joint.notice(scaler)
        for attached in self._attached:
            if said := scale_matters(attached.intervention):
                warnings.warn(
                    f"{attached.label}: a GradScaler makes the steps, and attach was not told of "
                    f"it. {said}. Use Parameters(stage='step'), and attach(..., scaler=scaler).",
                    SurgeryWarning,
                    stacklevel=2,
                )
                return

    def _admit(self, intervention: Intervention) -> Attached:
        """Make room for an intervention, with its label; nothing is hooked yet."""
        if not isinstance(intervention, Intervention):
            raise TypeError(f"a surgery takes Interventions, found {intervention!r}")
        if intervention.aggregator is not None:
            raise TypeError(
                f"{intervention.transform!r}: an aggregator is attached when the block begins"
            )
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
            rests=intervention.stage in RESTING,
        )
        attached = Attached(intervention, operation, self.ledger)
        self._attached.append(attached)
        return attached

    def _join(self, intervention: Intervention) -> None:
        """Take in an aggregator."""
        taken = {label for labels in self.labels for label in labels}
        self._check_flags(flags_of(intervention))
        self._joint.join(intervention, labels_of(intervention, taken)[0])
        for flag in flags_of(intervention):
            self.clock.flags.setdefault(flag.flag, flag.on)

    def _check(self, intervention: Intervention, instead: Attached | None = None) -> None:
        """Refuse what could not act; `instead` is the one whose place it takes."""
        check_scaled(intervention, self._patient.scaler)
        check_pattern(intervention, self._patient.model)
        intervention.at.find(self._patient.model)
        watched(intervention.when, self._patient.model)
        self._check_flags(flags_of(intervention), instead)

    def _check_flags(self, flags: Sequence[Flag], instead: Attached | None = None) -> None:
        others = [part for own in self._attached if own is not instead for part in own.flags]
        for one in self._joint.aggregations:
            others += flags_of(one.intervention)
        check_flags([*others, *flags])

    def _hook(self, attached: Attached) -> None:
        """Hook all its sites, or none of them."""
        with ExitStack() as undo:
            undo.callback(self._dismiss, attached)
            self._watch(attached)
            attached.operation.begin()
            attached.hook(self._patient)
            undo.pop_all()

    def _change(self, attached: Attached, new: Intervention) -> None:
        if attached not in self._attached:
            return
        old = attached.intervention
        attached.change(new)
        if new.when is not old.when:
            attached.forget_memory()
            attached.eyes.close()
            self._unsee(old.when)
            self._watch(attached)

    def _dismiss(self, attached: Attached) -> None:
        """Take an intervention off and out, with all that only it has needed."""
        if attached not in self._attached:
            return
        self._attached.remove(attached)
        self._notes += attached.finish()
        attached.close()
        attached.forget_states()
        self._unsee(attached.intervention.when)
        for entry in [entry for entry in self.ledger if entry.intervention == attached.label]:
            self.ledger.forget(entry.intervention, entry.site)

    def _watch(self, attached: Attached) -> None:
        """Let its trigger see what it looks at, and know the switches that it asks for."""
        for flag in flags_of(attached.intervention):
            self.clock.flags.setdefault(flag.flag, flag.on)
        when, eyes = attached.intervention.when, attached.eyes
        watch(when, self._patient.model, self.clock, eyes, attached.note)
        if "error" in attached.intervention.operator.needs:
            follow_error(self._patient.model, self.clock, eyes)

    def _unsee(self, trigger: Trigger) -> None:
        """Forget what a trigger has seen, unless another intervention has the same."""
        others = [part for own in self._attached for part in own.intervention.when.parts]
        for part in trigger.parts:
            if isinstance(part, Sourced) and part not in others:
                self.clock.seen.pop(part, None)

    def _find(self, label: str) -> Attached:
        _ = self._patient
        self._changes.settle()
        for attached in self._attached:
            if label in (attached.label, *attached.labels):
                return attached
        if any(label == one.label for one in self._joint.aggregations):
            raise ValueError(f"'{label}' is an aggregator, and stays as it is until the block ends")
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
            stack.callback(self._changes.close)
            stack.callback(self._joint.close)
        self.clock.seen.clear()
        self.clock.error = None
        self.ledger.settle()
        self.effects.close()

    def _complaints(self) -> list[str]:
        self._changes.settle()
        if self.shadow and not self.effects.every:
            return []  # nothing was asked of it
        why = self._blind(any(entry.all_calls for entry in self.ledger))
        own, model = self._attached, self._patient.model
        notes = [*self._notes, *self._joint.complaints()]
        return complaints(own, self.ledger, model, self.clock, self._began, notes, why)
