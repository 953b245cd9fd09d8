"""The interventions of a surgery that is attached: how one comes, changes and goes."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch.amp.grad_scaler import GradScaler

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.hooks.session import Session
from gradsurg.plugins.fields import nearest
from gradsurg.surgery.attached import Attached, check_flags, flags_of
from gradsurg.surgery.forward_observers import watch, watched
from gradsurg.surgery.intervention import (
    Intervention,
    check_per,
    check_scaled,
    labels_of,
    scale_matters,
)
from gradsurg.surgery.output_error import follow_error
from gradsurg.triggers.base import TensorTrigger, Trigger
from gradsurg.triggers.flag import Flag

if TYPE_CHECKING:
    from gradsurg.multitask.joint import MultiTaskBackward


class Roster:
    """The interventions that are attached, in order."""

    def __init__(self, session: Session, multi_task: "Callable[[], MultiTaskBackward]") -> None:
        self.attached: list[Attached] = []
        self.aggregators: dict[str, Intervention] = {}  # by label
        self.notes: list[str] = []  # of interventions that were removed
        self.session = session
        self._multi_task = multi_task

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What is attached now."""
        own = (attached.intervention for attached in self.attached)
        return (*own, *self.aggregators.values())

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every link of every intervention."""
        own = (attached.labels for attached in self.attached)
        return (*own, *((label,) for label in self.aggregators))

    def flags(self, instead: Attached | None = None) -> list[Flag]:
        """The switches that their triggers ask for, or are to ask for, but for those of one whose
        place is taken.
        """
        found = [part for own in self.attached if own is not instead for part in own.flags]
        for one in self.aggregators.values():
            found += flags_of(one)
        return found

    def take(self, intervention: Intervention) -> None:
        """Take one in as the block begins, with all its hooks."""
        if intervention.aggregator is None:
            self.hook(self.admit(intervention))
        else:
            self._join(intervention)

    def admit(self, intervention: Intervention) -> Attached:
        """Make room for an intervention, with its label; nothing is hooked yet."""
        if not isinstance(intervention, Intervention):
            raise TypeError(f"a surgery takes Interventions, found {intervention!r}")
        if intervention.aggregator is not None:
            raise TypeError(
                f"{intervention.transform!r}: an aggregator is attached when the block begins"
            )
        self.check(intervention)
        attached = Attached(intervention, self._labels_for(intervention), self.session)
        self.attached.append(attached)
        if attached.controller.named_tasks:
            self._multi_task().keep_buffers()
        return attached

    def check(self, intervention: Intervention, instead: Attached | None = None) -> None:
        """Refuse what could not act; `instead` is the one whose place it takes."""
        check_scaled(intervention, self.session.scaler)
        check_per(intervention, self.session.model)
        intervention.at.find(self.session.model)
        watched(intervention.when, self.session.model)
        check_flags([*self.flags(instead), *flags_of(intervention)])

    def hook(self, attached: Attached) -> None:
        """Hook all its sites, or none of them."""
        with ExitStack() as undo:
            undo.callback(self.dismiss, attached)
            self._watch(attached)
            attached.controller.begin_step()
            attached.hook(self.session)
            undo.pop_all()

    def change(self, attached: Attached, new: Intervention) -> None:
        """Have another transform or trigger in its place, if it is still there."""
        if attached not in self.attached:
            return
        old = attached.intervention
        attached.change(new)
        if new.when is not old.when:
            attached.forget_memory()
            attached.eyes.close()
            self._unsee(old.when)
            self._watch(attached)

    def dismiss(self, attached: Attached) -> None:
        """Take an intervention off and out, with all that only it has needed."""
        if attached not in self.attached:
            return
        self.attached.remove(attached)
        self.notes += attached.finish()
        attached.close()
        attached.forget_states()
        self._unsee(attached.intervention.when)
        ledger = self.session.ledger
        for entry in [entry for entry in ledger if entry.intervention == attached.label]:
            ledger.forget(entry.intervention, entry.site)

    def find(self, label: str) -> Attached:
        """The one of this label, or with a link of it. Raises LookupError, with those there are."""
        for attached in self.attached:
            if label in (attached.label, *attached.labels):
                return attached
        if label in self.aggregators:
            raise ValueError(f"'{label}' is an aggregator, and stays as it is until the block ends")
        names = [attached.label for attached in self.attached]
        raise LookupError(f"there is no intervention '{label}'. {nearest(label, names)}")

    def notice(self, scaler: GradScaler | None) -> None:
        """A scaler makes the steps: say once if it was not told, where that matters."""
        if scaler is None or self.session.scaler is scaler:
            return
        if self.aggregators:
            self._multi_task().notice()
        self.session.scaler = scaler  # for what will be added
        for attached in self.attached:
            if said := scale_matters(attached.intervention):
                warnings.warn(
                    f"{attached.label}: a GradScaler makes the steps, and attach was not told of "
                    f"it. {said}. Use Parameters(stage='step'), and attach(..., scaler=scaler).",
                    SurgeryWarning,
                    stacklevel=2,
                )
                return

    def close(self) -> None:
        """Take all hooks off; one that fails keeps no other on."""
        with ExitStack() as stack:
            for attached in self.attached:
                stack.callback(attached.close)

    def _join(self, intervention: Intervention) -> None:
        """Take in an aggregator."""
        from gradsurg.multitask.shared_parameters import SharedParameters

        label = self._labels_for(intervention)[0]
        check_scaled(intervention, self.session.scaler)
        check_flags([*self.flags(), *flags_of(intervention)])
        assert intervention.aggregator is not None
        assert isinstance(intervention.at, SharedParameters)
        self._multi_task().join(label, intervention.aggregator, intervention.at, intervention.when)
        self.aggregators[label] = intervention
        self._know_flags(intervention)

    def _labels_for(self, intervention: Intervention) -> tuple[str, ...]:
        return labels_of(intervention, {label for labels in self.labels for label in labels})

    def _know_flags(self, intervention: Intervention) -> None:
        """Have the switches that its trigger asks for on the clock."""
        for flag in flags_of(intervention):
            self.session.clock.flags.setdefault(flag.flag, flag.on)

    def _watch(self, attached: Attached) -> None:
        """Let its trigger see what it looks at, and know the switches that it asks for."""
        intervention, eyes = attached.intervention, attached.eyes
        model, clock = self.session.model, self.session.clock
        self._know_flags(intervention)
        watch(intervention.when, model, clock, eyes, attached.note)
        if "error" in intervention.operator.needs:
            follow_error(model, clock, eyes)

    def _unsee(self, trigger: Trigger) -> None:
        """Forget what a trigger has seen, unless another intervention has the same."""
        others = [part for own in self.attached for part in own.intervention.when.parts]
        for part in trigger.parts:
            if isinstance(part, TensorTrigger) and part not in others:
                self.session.clock.observations.pop(part, None)
