"""An attached surgery: the state that its hooks share, and how its interventions change."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.core import expectations
from gradsurg.core.door import AttachmentDoor
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.observers import observed_modules
from gradsurg.core.operation import Operation
from gradsurg.core.pitfalls import LISTENING, MOMENTS, listening
from gradsurg.core.pitfalls.base import Pitfall
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, warn_user
from gradsurg.sites.selection import one_scan
from gradsurg.sites.selectors import params_of
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.transforms.base import TransformState
from gradsurg.triggers.base import WHEN, Clock, TensorTrigger, Trigger

if TYPE_CHECKING:
    from gradsurg.multitask.backward import MultiTaskBackward
    from gradsurg.multitask.conflict import Conflicts

DETACHED = "the block has ended, and with it the surgery: attach it again"


class Attachment:
    """An attached surgery, as its hooks see it.

    An `Operation` is one intervention while it is attached; an aggregator has none. Its links are
    the transforms of its `Chain`, or its only transform. The kinds of site ask the `door` for the
    hook of each place.

    PyTorch's hooks hold this object. It holds the model weakly and the user's handle not at all:
    the finalizer of the handle closes it. The attachment, its door and its hooks refer to one
    another until `close`. Without torch.distributed `rank` is 0 and `processes` is 1.
    """

    params_of = staticmethod(params_of)  # for `core/pitfalls`, which may not import `sites`

    def __init__(
        self,
        model: nn.Module,
        effects: Effects,
        clock: Clock | None = None,
        states: dict[str, TransformState] | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        processes: int = 1,
        conflict_every: int = 1,
        shadow: bool = False,
        is_compiled: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._model: ref[nn.Module] | None = ref(model)  # None once the surgery is detached
        self.effects, self.clock = effects, clock or Clock()
        # The surgery has the same dict, which is therefore changed in place only. Its keys:
        # <label of a link>/<site>, or <label of a link>/group for a group transform;
        # <label of an operation>/<site>/when for a trigger;
        # <label>/<name> for tensors that a kind or an aggregator keeps.
        self.states = {} if states is None else states
        self.seed, self.conflict_every, self.scaler = seed, conflict_every, scaler
        self.rank, self.processes = rank, processes
        self.shadow = shadow  # effects are measured, and no result is used
        self.is_compiled = is_compiled  # whether `attach` was given the result of torch.compile
        self.first_step = self.clock.step  # the clock runs on over the blocks of a surgery
        self.backward_scale = 1.0  # the `scale` of the latest `live.backward`
        self.ledger, self.steps = Ledger(), OptimizerSteps()
        self.operations: list[Operation] = []  # the interventions with a transform, in order
        self.aggregators: dict[str, Intervention] = {}  # by label
        self.warned: set[str] = set()  # the texts, or their keys, that were emitted
        self.removed_notes: list[str] = []  # warnings for the end, of interventions removed
        # The pitfalls that were made for this attachment, and, by moment (the name of a method of
        # `Pitfall`), their methods, for `tell`. Any: each has other arguments.
        self._pitfalls: dict[type[Pitfall], Pitfall] = {}
        self.listeners: dict[str, list[Any]] = {moment: [] for moment in MOMENTS}
        # Functions of the aggregators: called before a step is counted, and by the pitfall
        # `StepHooks` after the first steps. Unlike the methods of pitfalls they return no texts.
        self.before_tick: list[Callable[[], None]] = []
        self.at_first_steps: list[Callable[[], None]] = []
        self.forward_check = ExitStack()  # removes the hook of `expectations.check_places`
        self.door = AttachmentDoor(self)  # for the kinds of site
        effects.begin(self.clock.step)

    # What hooks and pitfalls read.

    @property
    def is_open(self) -> bool:
        """Whether the surgery is attached."""
        return self._model is not None

    @property
    def model(self) -> nn.Module:
        """The model. Raises RuntimeError if the surgery is detached."""
        model = None if self._model is None else self._model()
        if model is None:
            raise RuntimeError(DETACHED)
        return model

    def check_open(self) -> None:
        """Raise RuntimeError if the surgery is detached."""
        if not self.is_open:
            raise RuntimeError(DETACHED)

    @property
    def measures_conflicts(self) -> bool:
        """Whether the conflict of several tasks is measured in this step."""
        return self.effects.sampling and self.clock.step % self.conflict_every == 0

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled GradScaler scales the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """What the losses were multiplied by: the scale of the GradScaler and of `backward`."""
        scaler = self.scaler if self.is_scaled else None
        return self.backward_scale * (1.0 if scaler is None else scaler.get_scale())

    def warn_once(self, text: str, key: str = "") -> None:
        """Warn the caller outside gradsurg; texts with the same `key` are emitted once."""
        if (key or text) not in self.warned:
            self.warned.add(key or text)
            warn_user(text)

    @cached_property
    def conflicts(self) -> "Conflicts":
        """How much the gradients of the tasks of `live.backward` conflict, at measured steps."""
        from gradsurg.multitask.conflict import Conflicts

        return Conflicts()

    @cached_property
    def multi_task(self) -> "MultiTaskBackward":
        """The aggregators, and the backward passes of several losses."""
        # Imported and made at first use, as most surgeries have a single loss.
        from gradsurg.multitask.backward import MultiTaskBackward

        multi_task = MultiTaskBackward(self, self.conflicts)
        self.before_tick.append(multi_task.after_step)
        self.at_first_steps.append(multi_task.warn_unused)
        return multi_task

    @property
    def has_multi_task(self) -> bool:
        """Whether `multi_task` was made, which happens at its first use."""
        return "multi_task" in vars(self)  # where `cached_property` keeps its value

    def warn_unknown_scaler(self) -> None:
        """Warn that a pitfall has found a GradScaler which the aggregators do not know."""
        if self.has_multi_task:
            self.multi_task.warn_unknown_scaler()

    def enter_unmet(self) -> None:
        """Enter into the ledger the sites that were expected and have not come."""
        expectations.enter_unmet(self)

    def tell(self, moment: str, *found: object) -> None:
        """Call the method `moment` of the pitfalls that override it; emit the warnings."""
        for listener in [*self.listeners[moment]]:  # a copy, as some are removed
            for text in listener(self, *found) or ():
                self.warn_once(text)
            # `__self__` is the pitfall whose method this is; it says when it has heard enough.
            if moment in listener.__self__.done:
                self.listeners[moment].remove(listener)

    # Changes, for the handle.

    @property
    def labels(self) -> list[tuple[str, ...]]:
        """The labels of the links of each intervention, aggregators last."""
        return [
            *(each.labels for each in self.operations),
            *((label,) for label in self.aggregators),
        ]

    def add(self, *interventions: Intervention) -> None:
        """Attach interventions; after an error none of the given transforms is attached.

        Only `Surgery.start` gives aggregators, and it closes the attachment after an error. Raises
        LookupError, listing the names, if a selector picks nothing. If places are known in a
        forward only, the first forward raises it.
        """
        operations, labels = [*self.operations], self.labels
        aggregators: list[str] = []
        for intervention in interventions:
            combines = intervention.aggregator is not None
            # Most need no check. `combines` first: an aggregator has no `is_checked_at_attach`.
            if combines or self.scaler is not None or intervention.is_checked_at_attach:
                self.check(intervention, operations)
            labels.append(labels_of(intervention, labels))
            if combines:
                # Before `_watch`: with an aggregator `door.traced` gives compiled code no hooks.
                self.aggregators[labels[-1][0]] = intervention
                aggregators.append(labels[-1][0])
                continue
            operations.append(operation := Operation(self, intervention, labels[-1]))
            if intervention.changed_tensors != "gradients":
                self.effects.others[operation.label] = intervention.changed_tensors
        # `ForTask` needs a backward pass for each task: graphs compiled from now on must allow it.
        if any(each.named_tasks for each in operations):
            self.multi_task.keep_buffers()
        before = self.operations
        try:
            self._watch(operations)
            # Last: hooks run in order, and an aggregator's must see the outputs that the hooks
            # of sites return.
            for label in aggregators:
                self.multi_task.add(label, self.aggregators[label])
                self.begin_flags(self.aggregators[label])
        except BaseException:  # also an interrupt: no hook may be left
            self._watch(before)
            for each in operations:
                if each not in before:
                    self.forget(each)
                    each.close()  # again: `_watch` may have failed before it took them over
            raise

    def remove(self, operation: Operation) -> None:
        """Detach an intervention; keep its warnings for the end, and forget the rest."""
        self.removed_notes += expectations.closing_notes(self, operation)
        self._watch([each for each in self.operations if each is not operation])
        self.forget(operation)

    def forget(self, operation: Operation) -> None:
        """Drop the states, the ledger entries without a gradient, and what its trigger has read."""
        for key in [*self.states]:
            # States of triggers have the label of the operation, those of links their own.
            if key.partition("/")[0] in (operation.label, *operation.labels):
                del self.states[key]
        for entry in self.ledger.of(operation.label):  # those that saw a gradient stay
            self.ledger.forget(operation.label, entry.site)
        self._drop_observations(operation.trigger)

    def set(self, operation: Operation, intervention: Intervention) -> None:
        """Set another transform with as many links, or another trigger, at the same places.

        The states of the transforms stay, those of another trigger are dropped.
        """
        self.check(intervention, [each for each in self.operations if each is not operation])
        observed_modules(intervention.forward_triggers, self.model)  # raises before any change
        trigger = operation.trigger
        if intervention.when is not trigger:
            prefix = f"{operation.label}/"
            for key in [key for key in self.states if key.startswith(prefix)]:
                if key.endswith(WHEN):
                    del self.states[key]
        if intervention.operator != operation.intervention.operator:
            # The key of a warning of `pitfalls/accumulation.py`: the new transform may need it.
            self.warned.discard(f"{operation.label} acts on parts")
        operation.set(intervention)
        if intervention.when is not trigger:
            operation.observe(self.model)
            self._drop_observations(trigger)
        # Again: joints and compiled code hold what the old transform asked for.
        self._watch(self.operations)

    def bind(
        self, optimizer: Optimizer | Sequence[Optimizer], clock: Optimizer | None = None
    ) -> None:
        """Use these optimizers from now on, keep states; count steps of `clock` or the first."""
        # Weakly: the hooks of an optimizer, which may outlive the surgery, hold the function.
        self.steps.bind(optimizer, clock, WeakMethod(self.tick))
        at_step = [each for each in self.operations if each.stage == "step"]
        for each in self.operations:
            # While it is new, a parameter that no optimizer holds raises an error, as at attach.
            each.is_new = each in at_step
            each.invalidate()  # checks were made with other optimizers
        try:  # the earlier optimizers are unhooked already: after an error none is bound
            kinds = dict.fromkeys(kind for each in at_step for kind in each.kinds)
            self.door.watch({kind: self.door.search_again(kind) for kind in kinds})
            expectations.check_places(self)
        except BaseException:
            self.steps.close()
            raise
        finally:
            for each in at_step:
                each.is_new = False

    def tick(self) -> None:
        """Count a step of the optimizer."""
        for act in [*self.before_tick]:
            act()
        clock = self.clock
        clock.step += 1
        clock.backwards = 0
        clock.error, clock.batch = None, {}  # of the step that has ended
        self.effects.begin(clock.step)
        self.tell("step_ended")
        # A function that was called above may have closed the surgery, and with it the operations.
        for operation in self.operations if self.is_open else ():
            operation.begin_step()
            if operation.examples is not None:
                operation.examples.end_step()  # frees the gradients of single examples

    def load_states(self) -> None:
        """Continue from the states and the step that were loaded into `states` and `clock`."""
        self.effects.begin(self.clock.step)
        for operation in self.operations:
            operation.invalidate()  # decisions and checks were of the old state
            for hook in operation.hooks.values():
                hook.forget_steps()

    def close(self) -> None:
        """Remove all hooks; those on built graphs pass gradients unchanged from now on."""
        if self._model is None:
            return
        # Closes all, also if removing one fails, and the last first: operations before hooks.
        with ExitStack() as stack:
            for each in (self.door, self.forward_check, self.steps):
                stack.callback(each.close)
            for pitfall in self._pitfalls.values():
                stack.callback(pitfall.stack.close)
            if self.has_multi_task:
                # Popped, so that `has_multi_task` is False from here on.
                stack.callback(vars(self).pop("multi_task").close)
            for operation in self.operations:
                stack.callback(operation.close)
        # Built graphs may keep this object alive: drop all that leads to the model or to tensors.
        self._model = self.scaler = None
        self.before_tick.clear()
        self.at_first_steps.clear()
        for table in (self._pitfalls, *self.listeners.values()):
            table.clear()
        del self.door
        self.clock.observations.clear()
        self.clock.error, self.clock.batch = None, {}
        self.ledger.settle()

    # Helpers.

    def check(self, intervention: Intervention, others: Iterable[Operation]) -> None:
        """Raise an error for an intervention that cannot act beside `others`."""
        if self.scaler is not None:
            intervention.check_loss_scale(self.scaler)
        if intervention.aggregator is None and (intervention.checks_sites or intervention.dense):
            intervention.check_sites(self.model)
        if not intervention.flags:
            return
        items = [*(each.intervention for each in others), *self.aggregators.values()]
        # Attached switches of one name agree, as each was checked here.
        first = {flag.flag: flag.on for item in items for flag in item.flags}
        for flag in intervention.flags:
            if first.setdefault(flag.flag, flag.on) != flag.on:
                raise ValueError(f"{flag!r}: another trigger has this switch as on={not flag.on}")

    def begin_flags(self, intervention: Intervention) -> None:
        """Set the switches that a trigger reads, unless they are known."""
        for flag in intervention.flags:
            self.clock.flags.setdefault(flag.flag, flag.on)

    def _drop_observations(self, trigger: Trigger) -> None:
        """Drop the observations of a trigger, unless another intervention reads the same."""
        others = [part for each in self.operations for part in each.trigger.parts]
        for part in trigger.parts:
            if isinstance(part, TensorTrigger) and part not in others:
                self.clock.observations.pop(part, None)

    def _watch(self, operations: list[Operation]) -> None:
        """Set `self.operations`; remove all hooks of these kinds and register them anew."""
        model = self.model
        for gone in {*self.operations} - {*operations}:
            gone.close()  # graphs built earlier keep calling its hooks: they must do nothing
        # Kinds of removed interventions too: they are hooked again without them, or not at all.
        kinds = dict.fromkeys(
            kind for each in (*self.operations, *operations) for kind in each.kinds
        )
        with one_scan(model):
            things = {kind: kind.things(model) for kind in kinds}
            for operation in operations:
                if operation not in self.operations:
                    operation.near = operation.at.search(things, operation.memory)
                    operation.at.check(things, operation.memory)
                    if operation.intervention.observes:
                        operation.observe(model)
            self.operations = operations
            self.door.watch(things)
        # Last, which makes them outermost: the hooks that number calls must enclose all others.
        if self.door.shared.threads:
            self.door.shared.renew()
        expectations.check_places(self)
        for operation in operations:
            operation.is_new = False
        self._listen()
        self.tell("attached")

    def _listen(self) -> None:
        """Let the pitfalls of the kinds that are attached listen."""
        if self.shadow and not self.effects.every:
            return  # nothing acts and nothing is measured
        kinds = {f"{kind.name}.{kind.mode}" for each in self.operations for kind in each.kinds}
        for pitfall in listening(kinds):
            if pitfall not in self._pitfalls:  # one object for all changes of the interventions
                self._pitfalls[pitfall] = made = pitfall()
                for moment in LISTENING[pitfall]:
                    self.listeners[moment].append(getattr(made, moment))
