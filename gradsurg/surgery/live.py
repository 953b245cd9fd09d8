"""A surgery while it is attached."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradsurg.hooks.session import Session
from gradsurg.plugins.fields import nearest
from gradsurg.surgery.attached import Attached
from gradsurg.surgery.changes import Changes
from gradsurg.surgery.closing import complaints
from gradsurg.surgery.intervention import Intervention
from gradsurg.surgery.retuning import retuned
from gradsurg.surgery.roster import Roster
from gradsurg.torch_internals import autograd
from gradsurg.triggers.base import Trigger

if TYPE_CHECKING:
    from gradsurg.multitask.conflict import Conflicts
    from gradsurg.multitask.joint import MultiTaskBackward
    from gradsurg.multitask.losses import Losses


class Live:
    """A surgery while it is attached: its effects, its ledger, its clock, its interventions."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.effects = session.effects
        self.ledger = session.ledger
        self.clock = clock = session.clock
        self._multi_task: MultiTaskBackward | None = None
        self._roster = Roster(session, self._load_multi_task)
        self._changes = Changes(session.model)
        self._first = True  # until a step was seen
        self._began = clock.step, clock.counted_epochs
        self._blind: Callable[[bool], str] = lambda acted: ""  # why no hook may have run
        session.effects.begin(clock.step)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What is attached now, in order."""
        return self._roster.interventions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every link of every intervention."""
        return self._roster.labels

    @cached_property
    def conflicts(self) -> "Conflicts":
        """How far the tasks of `backward` conflict, at the measured steps."""
        from gradsurg.multitask.conflict import Conflicts

        return Conflicts()

    def backward(
        self, losses: "Losses", *, aggregate: bool = True, retain_graph: bool = False
    ) -> None:
        """In place of `sum(losses).backward()`: one update from several losses.

        `losses` are tensors of no axes, by the names of their tasks or in an order. The gradients
        of the tasks flow one after the other, and transforms meet each of them. An aggregator makes
        one gradient of them for each group of shared parameters; a parameter that one task alone
        reaches gets that of its task. The results are added to `.grad`. Other leaves, as an input
        that needs a gradient, get the sum. A hook of your own on a parameter is called for each
        task, and then for the result.

        An aggregator that weighs losses, as `Mean` does, takes one backward of the weighed losses
        instead, unless a transform on the way is not linear, which is to meet each task: so the
        weights are those of the heads too. At steps that are measured the tasks have passes of
        their own besides, which hooks of your own meet. With no aggregator it is one backward of
        the sum.

        With `aggregate=False` the gradients wait, and are added to those of the next call: several
        batches make one step so, of which each may have some of the tasks (but where losses are
        weighed). `discard` drops what waits, as where a batch is left out; so do an error and a
        step of the optimizer. `retain_graph` is that of `Tensor.backward`. With a GradScaler give
        scaled losses.

        Raises TypeError or ValueError for what is no loss, for a transform that would remember the
        gradients of one task for the next, and, where gradients are made one, for losses that
        share no parameter.
        """
        self.session.check_attached()
        controllers = [attached.controller for attached in self._roster.attached]
        with self._changes.held():
            self._load_multi_task().backward(losses, controllers, aggregate, retain_graph)

    def discard(self) -> None:
        """Drop the gradients that wait since `live.backward(..., aggregate=False)`, if any do.

        Those of losses that were weighed, as by `Mean`, do not wait: they are in `.grad`.
        """
        if self._multi_task is not None:
            self._multi_task.discard()

    def tick(self) -> None:
        """One optimizer step is done; called by the optimizer's own hook where one was given."""
        self._changes.settle()
        if self._multi_task is not None:
            self._multi_task.stepped()
        if self._first:
            self._first = False
            self._roster.notice(autograd.stepping_scaler())
        self.clock.step += 1
        self.clock.backwards = 0
        self.clock.error = None
        self.effects.begin(self.clock.step)
        for attached in self._roster.attached:
            attached.begin()
            attached.rest()

    def next_epoch(self) -> None:
        """One epoch is done. Raises RuntimeError where `steps_per_epoch` tells that already."""
        if self.clock.epoch_length is not None:
            raise RuntimeError(
                f"epochs are counted already: steps_per_epoch={self.clock.epoch_length}"
            )
        self.clock.counted_epochs += 1
        for attached in self._roster.attached:
            attached.controller.begin_step()

    def switch(self, flag: str, *, on: bool) -> None:
        """Flip the switch of `Flag(flag)`, from any thread, at once.

        Raises LookupError if no trigger asks for it.
        """
        self.session.check_attached()
        flags = list(dict.fromkeys(part.flag for part in self._roster.flags()))
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
        attached = self._roster.admit(intervention)
        self._changes.soon(lambda: self._roster.hook(attached))
        return attached.label

    def remove(self, label: str) -> None:
        """Detach the intervention of this label, from the next backward on, and drop its state.

        Raises LookupError, with the labels there are.
        """
        attached = self._find(label)
        if label != attached.label:
            raise LookupError(f"'{label}' is a link of '{attached.label}': remove the whole")
        self._changes.soon(lambda: self._roster.dismiss(attached))

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or `when` it acts, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform's
        state is kept, the memory of a trigger that is replaced is not. Raises LookupError for a
        label that is not there, ValueError for a wrong field, and for a transform or a trigger that
        could not act there.
        """
        attached = self._find(label)
        new = retuned(attached.wanted, attached.labels, label, when, changes)
        self._roster.check(new, attached)
        attached.wanted = new
        self._changes.soon(lambda: self._roster.change(attached, new))

    def _find(self, label: str) -> Attached:
        self.session.check_attached()
        self._changes.settle()
        return self._roster.find(label)

    def _load_multi_task(self) -> "MultiTaskBackward":
        """The part for several losses, imported and made at first need."""
        from gradsurg.multitask.joint import MultiTaskBackward

        if self._multi_task is None:
            self._multi_task = MultiTaskBackward(self.session, self.conflicts)
        return self._multi_task

    def _refresh(self) -> None:
        """States were loaded, and a step with them: the gates take them up."""
        self.effects.begin(self.clock.step)
        for attached in self._roster.attached:
            attached.refresh()

    def _close(self) -> None:
        """Take all hooks off; those on graphs that are already built pass from now on."""
        with ExitStack() as stack:
            stack.callback(self._roster.close)
            stack.callback(self._changes.close)
            if self._multi_task is not None:
                stack.callback(self._multi_task.close)
        self.session.close()

    def _complaints(self) -> list[str]:
        self._changes.settle()
        if self.session.shadow and not self.effects.every:
            return []  # nothing was asked of it
        why = self._blind(any(entry.all_calls for entry in self.ledger))
        roster = self._roster
        notes = roster.notes
        if self._multi_task is not None:
            notes = [*notes, *self._multi_task.complaints()]
        return complaints(
            roster.attached, self.ledger, self.session.model, self.clock, self._began, notes, why
        )
