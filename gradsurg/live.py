"""A surgery while it is attached."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any
from weakref import ref

from torch import nn

from gradsurg import engine
from gradsurg.attached import Attached, Patient, check_flags, flags_of
from gradsurg.effects import Effects
from gradsurg.fields import FieldError, nearest
from gradsurg.intervention import (
    Intervention,
    check_pattern,
    check_scaled,
    labels_of,
)
from gradsurg.ledger import Ledger
from gradsurg.operation import Operation
from gradsurg.sources import watch, watched
from gradsurg.transforms.base import State, Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Clock, Sourced, Trigger
from gradsurg.triggers.epochs import Epochs

# What passes outside a backward can be written to at once.
FORWARD = ("forward", "step", "captured")
# What is left where others may write to it: in `.grad`, or in a user's hands.
RESTING = ("accumulated", "settled", "backward_end", *FORWARD)


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
        if self._waiting:
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

    def _admit(self, intervention: Intervention) -> Attached:
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
            rests=intervention.stage in RESTING,
        )
        attached = Attached(intervention, operation, self.ledger)
        self._attached.append(attached)
        return attached

    def _check(self, intervention: Intervention, instead: Attached | None = None) -> None:
        """Refuse what could not act; `instead` is the one whose place it takes."""
        check_scaled(intervention, self._patient.scaler)
        check_pattern(intervention, self._patient.model)
        intervention.at.find(self._patient.model)
        watched(intervention.when, self._patient.model)
        others = [part for own in self._attached if own is not instead for part in own.flags]
        check_flags([*others, *flags_of(intervention)])

    def _hook(self, attached: Attached) -> None:
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

    def _find(self, label: str) -> Attached:
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
        said += [note for attached in self._attached for note in attached.finish()]
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


def _changed(link: Transform, label: str, changes: dict[str, object]) -> Transform:
    known = [field.name for field in fields(link)] if hasattr(link, "__dataclass_fields__") else []  # pyright: ignore[reportArgumentType]
    wrong = [
        (key, f"is not a field here. {nearest(key, known)}") for key in changes if key not in known
    ]
    if wrong:
        raise FieldError(label, wrong)
    return replace(link, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
