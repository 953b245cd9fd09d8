"""The handle of an attached surgery: steps, switches, losses, and changes while it runs."""

import atexit
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod, WeakSet, finalize, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.hooks.controller import Session, warn_user
from gradsurg.hooks.intervention import Intervention, labels_of
from gradsurg.plugins.messages import nearest
from gradsurg.sites.wrapped_models import late_hooks_reason
from gradsurg.surgery.attachment import Attachment
from gradsurg.surgery.coverage import clock_warnings, unhooked_warnings
from gradsurg.surgery.forward_observers import observed_modules
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import SKIPPED
from gradsurg.triggers.base import TensorTrigger, Trigger
from gradsurg.triggers.flag import Flag

if TYPE_CHECKING:
    from gradsurg.multitask.backward import MultiTaskBackward
    from gradsurg.multitask.conflict import Conflicts
    from gradsurg.multitask.losses import Losses
    from gradsurg.per_example.gradients import ExampleSource


_open: "WeakSet[Live]" = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is still attached when the program ends, with its warnings."""
    for live in list(_open):
        unentered = list(live.unentered)
        live.close()
        _warn(unentered)


def _remove_hooks(stack: ExitStack, unentered: Sequence[str]) -> None:
    stack.close()
    _warn(unentered)


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        warn_user(text)


class Live:
    """An attached surgery: its effects, its ledger, its clock, its interventions.

    `is_compiled` means that the compiled form of the model was attached.
    """

    def __init__(self, session: Session, model: nn.Module, is_compiled: bool) -> None:
        self.session = session
        self.effects = session.effects
        self.ledger = session.ledger
        self.clock = clock = session.clock
        self._attachments: list[Attachment] = []
        self._aggregators: dict[str, Intervention] = {}  # by label
        self._removed: list[str] = []  # the detach warnings of interventions that were removed
        self._changes = _PendingChanges(model)
        self._multi_task: MultiTaskBackward | None = None
        self._has_stepped = False
        self._start = clock.step, clock.counted_epochs
        self._is_compiled = is_compiled
        self._had_compiled = compiling.has_compiled()  # before the hooks were there
        session.effects.begin(clock.step)
        self.on_end: Callable[[], None] = lambda: None
        self.is_state_in_model = False  # `in_state_dict` of `attach`
        # What removes the hooks must not refer to this object, which would never be garbage then.
        self.stack = ExitStack()
        self.stack.callback(session.close)
        self.stack.callback(self._changes.close)
        self.stack.callback(_close_attachments, self._attachments)
        self.unentered: list[str] = []
        """The warning of an `attach` that was neither entered by `with` nor closed."""
        self._finalizer = finalize(self, _remove_hooks, self.stack, self.unentered)
        _open.add(self)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The attached interventions, in order, aggregators last."""
        attached = (attachment.intervention for attachment in self._attachments)
        return (*attached, *self._aggregators.values())

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels of the links of each intervention."""
        attached = (attachment.labels for attachment in self._attachments)
        return (*attached, *((label,) for label in self._aggregators))

    @cached_property
    def conflicts(self) -> "Conflicts":
        """How much the gradients of the tasks of `backward` conflict, at the measured steps."""
        from gradsurg.multitask.conflict import Conflicts

        return Conflicts()

    @property
    def examples(self) -> "dict[str, ExampleSource]":
        """Numbers about the gradients of single examples, by the label of each `PerSample`."""
        sources = {item.label: item.examples for item in self._attachments}
        return {label: source for label, source in sources.items() if source is not None}

    @property
    def skipped_steps(self) -> dict[str, int]:
        """The number of steps that each `SkipUpdate` has skipped, by its label."""
        return {
            label: int(self.session.states.get(f"{label}/group", {}).get(SKIPPED, 0))
            for attachment in self._attachments
            for label, link in zip(attachment.labels, attachment.intervention.links, strict=True)
            if "skip" in link.needs
        }

    def backward(
        self,
        losses: "Losses",
        *,
        scale: float = 1.0,
        aggregate: bool = True,
        retain_graph: bool = False,
    ) -> None:
        """Replace `sum(losses).backward()`: one update from several losses.

        `losses` are scalar tensors, in a dict by task name or in a list. Each task is
        backpropagated separately, and transforms act on each. An aggregator combines the gradients
        of each group of shared parameters into one; a parameter that only one task reaches gets the
        gradient of that task. The results are added to `.grad`. Other leaves, as an input that
        requires a gradient, get the sum. Your own hook on a parameter is called for each task, and
        for the result.

        If the aggregator weights losses, as `Mean` does, and no non-linear transform has to act on
        each task, there is one backward of the weighted losses, so the weights also apply to
        parameters of a single task. In measured steps each task has an extra pass, which calls your
        own hooks. Without an aggregator there is one backward of the sum.

        With `aggregate=False` the gradients are kept, and added to those of the next call, so that
        several batches make one step; each may have some of the tasks, unless losses are weighted.
        `discard`, an error and a step of the optimizer drop kept gradients. `retain_graph` is that
        of `Tensor.backward`. With a GradScaler pass scaled losses. `scale` multiplies the update,
        as the 1/n of a framework that accumulates n batches; losses keep their values for methods
        that read them.

        Raises TypeError or ValueError for an invalid loss, for a transform whose state would mix
        the gradients of the tasks, and, with an aggregator, for losses that share no parameter.
        """
        self.session.check_attached()
        controllers = [attachment.controller for attachment in self._attachments]
        with self._changes.hold():
            self.multi_task.backward(losses, controllers, scale, aggregate, retain_graph)

    @property
    def reads_example_labels(self) -> bool:
        """Whether a transform reads the labels given to `set_example_labels`."""
        return any("labels" in attachment.intervention.needs for attachment in self._attachments)

    def set_example_labels(self, labels: Tensor) -> None:
        """Give the labels (n,) of the n examples of the next backward passes, until a step ends.

        For transforms that read them, as `Route`. Call it before each backward pass whose batch is
        another one. Raises TypeError for anything but a tensor of integers with one axis.
        """
        self.session.check_attached()
        if not isinstance(labels, Tensor):
            raise TypeError(f"labels: must be a tensor of integers, found {labels!r}")
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            kind = f"{labels.dtype} of shape {list(labels.shape)}"
            raise TypeError(f"labels: must be integers of shape [n], found {kind}")
        self.clock.labels = labels.detach()

    def discard(self) -> None:
        """Drop the gradients kept by `live.backward(..., aggregate=False)`.

        With an aggregator that weights losses, as `Mean`, none are kept: they are in `.grad`.
        """
        if self._multi_task is not None:
            self._multi_task.discard()

    def tick(self) -> None:
        """Count an optimizer step; called by a hook of the optimizer given to `attach`."""
        if self._changes.pending:
            self._changes.apply()
        if self._multi_task is not None:
            self._multi_task.after_step()
        if not self._has_stepped:
            self._has_stepped = True
            self._notice_scaler()
        clock = self.clock
        clock.step += 1
        clock.backwards = 0
        clock.error = clock.labels = None
        self.effects.begin(clock.step)
        for attachment in self._attachments:
            attachment.begin_step()

    def next_epoch(self) -> None:
        """Count an epoch. Raises RuntimeError if `steps_per_epoch` counts them already."""
        if self.clock.epoch_length is not None:
            raise RuntimeError(
                f"epochs are counted already: steps_per_epoch={self.clock.epoch_length}"
            )
        self.clock.counted_epochs += 1
        for attachment in self._attachments:
            attachment.controller.begin_step()

    def switch(self, flag: str, *, on: bool) -> None:
        """Set the switch that `Flag(flag)` reads; takes effect at once, from any thread.

        Raises LookupError if no trigger reads it.
        """
        self.session.check_attached()
        flags = list(dict.fromkeys(part.flag for part in self._flags()))
        if flag not in flags:
            raise LookupError(f"no trigger asks for a Flag '{flag}'. {nearest(flag, flags)}")
        if not isinstance(on, bool):
            raise TypeError(f"on: must be True or False, found {on!r}")
        self.clock.flags[flag] = on

    def add(self, intervention: Intervention) -> str:
        """Attach one more intervention and return its label, for `remove` and `set`.

        It acts from the next backward on, or from the next forward on if it hooks tensors in the
        forward, as Outputs does, or reads the batch. Inside a backward it is attached when that has
        ended. An error leaves nothing attached.
        """
        attachment = self._admit(intervention, self.session.model)
        self._had_compiled = self._had_compiled or compiling.has_compiled()
        self._changes.request(lambda: self._hook(attachment))
        return attachment.label

    def remove(self, label: str) -> None:
        """Detach an intervention, from the next backward on, and drop its state.

        Raises LookupError, listing the labels, unless one is `label`.
        """
        attachment = self._find(label)
        if label != attachment.label:
            raise LookupError(f"'{label}' is a link of '{attachment.label}': remove the whole")
        self._changes.request(lambda: self._remove(attachment))

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or its trigger, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform
        keeps its state; a replaced trigger loses its own. Raises LookupError for an unknown label,
        ValueError for a wrong field and for a transform or a trigger that cannot act there.
        """
        attachment = self._find(label)
        new = attachment.planned.changed(attachment.labels, label, when, changes)
        self._check(new, self.session.model, replaced=attachment)
        attachment.planned = new
        self._changes.request(lambda: self._change(attachment, new))

    def bind(
        self, optimizer: Optimizer | Sequence[Optimizer], *, clock: Optimizer | None = None
    ) -> None:
        """Use these optimizers from now on, in the place of earlier ones; states are kept.

        Each may be wrapped, as by Accelerate or Lightning, with the optimizer as its `.optimizer`.
        Steps of `clock` are counted, by default those of the first. Raises TypeError for something
        that is no optimizer, ValueError if stage `step` has a parameter that none of them holds.
        """
        self.session.check_attached()
        steps = self.session.steps
        steps.bind(optimizer, clock, WeakMethod(self.tick))
        with ExitStack() as undo:
            undo.callback(steps.close)
            for place, attachment in enumerate(self._attachments):
                if attachment.controller.stage == "step":
                    attachment.close()
                    renewed = Attachment(attachment.intervention, attachment.labels, self.session)
                    self._attachments[place] = renewed
                    renewed.attach(self.session.model)
                else:
                    attachment.controller.set(attachment.intervention)
            undo.pop_all()
        self.warn_of_lost_state()

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Let stage `step` act now, and not in the next step of the optimizer.

        For loops in which something else comes between, as the clipping of a framework. Of several
        optimizers all are meant, or the given one. Gradients must be unscaled: with a GradScaler
        call `scaler.unscale_(optimizer)` first. Raises RuntimeError if they are not, ValueError if
        no optimizer is bound.
        """
        self.session.check_attached()
        self.session.steps.run_before(optimizer, self.session.scaler)

    def close(self) -> None:
        """Remove all hooks, and warn of what did not act; does nothing if that is done."""
        if not self._finalizer.alive:
            return
        try:
            for text in self._end_warnings():
                warn_user(text)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove all hooks without a warning: an error has ended the training."""
        self.on_end()
        self.unentered.clear()
        self._finalizer()

    def __enter__(self) -> Self:
        self.unentered.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def _waiting(self) -> list[Attachment]:
        """What waits for `bind`."""
        if self.session.steps.optimizers:
            return []
        return [each for each in self._attachments if each.controller.stage == "step"]

    # Called by Surgery.

    def warn_of_lost_state(self) -> None:
        """Warn if training seems to go on and the state of `in_state_dict` was not loaded."""
        optimizers = self.session.steps.optimizers
        if self.is_state_in_model and not self.step and any(each.state for each in optimizers):
            warn_user(
                "in_state_dict: the optimizer has a state, as after a resume, and the surgery has "
                "none: load the model's state while the surgery is attached, or a load with "
                "strict=False loses that of the surgery"
            )

    def _load_states(self) -> None:
        """Take over the states and the step of the session."""
        self.effects.begin(self.clock.step)
        for attachment in self._attachments:
            attachment.load_states()

    def _end_warnings(self) -> list[str]:
        """Return the warnings to emit on detach."""
        self._changes.apply()
        session, attachments = self.session, self._attachments
        if session.shadow and not self.effects.every:
            return []  # nothing acts and nothing is measured
        reason = ""
        if self._had_compiled:
            has_acted = any(entry.all_calls for entry in self.ledger)
            reason = late_hooks_reason(session.model, self._is_compiled, has_acted)
        texts = self.ledger.warnings(self._start[0], reason)
        waiting = self._waiting
        if waiting:
            reason = " It acts at stage 'step', and live.bind(optimizer) was not called."
        recorded = {entry.intervention for entry in self.ledger}
        unmet = [item.label for item in attachments if item.label not in recorded]
        texts += [
            f"{label}: attached, but none of its sites was met: was the model called?{reason}"
            for label in unmet
        ]
        texts += self._removed
        if self._multi_task is not None:
            texts += self._multi_task.closing_warnings()
        texts += [text for attachment in attachments for text in attachment.end_warnings()]
        if any(entry.calls for entry in self.ledger):
            triggers = [attachment.intervention.when for attachment in attachments]
            texts += clock_warnings(triggers, self.clock, self._start)
        texts += unhooked_warnings(
            [each.coverage for each in attachments if each not in waiting], session.model
        )
        return texts

    # Helpers.

    def _flags(self, without: Attachment | None = None) -> list[Flag]:
        """The switches that the triggers read, now or after pending changes."""
        flags = [
            flag
            for attachment in self._attachments
            if attachment is not without
            for flag in (*attachment.intervention.flags, *attachment.planned.flags)
        ]
        return flags + [flag for item in self._aggregators.values() for flag in item.flags]

    def _check(
        self, intervention: Intervention, model: nn.Module, replaced: Attachment | None = None
    ) -> None:
        """Raise an error for an intervention that cannot act, in the place of `replaced`."""
        scaler, flags = self.session.scaler, intervention.flags
        if scaler is not None:
            intervention.check_loss_scale(scaler)
        if intervention.aggregator is None:
            intervention.check_model(model)
            if intervention.forward_triggers:
                observed_modules(intervention.forward_triggers, model)
        first = {flag.flag: flag.on for flag in self._flags(without=replaced)} if flags else {}
        for flag in flags:
            if first.setdefault(flag.flag, flag.on) != flag.on:
                raise ValueError(f"{flag!r}: another trigger has this switch as on={not flag.on}")

    def _admit(self, intervention: Intervention, model: nn.Module) -> Attachment:
        """Check an intervention and reserve its labels; nothing is hooked yet."""
        if not isinstance(intervention, Intervention):
            raise TypeError(f"a surgery takes Interventions, found {intervention!r}")
        if intervention.aggregator is not None:
            raise TypeError(
                f"{intervention.transform!r}: an aggregator is attached when the block begins"
            )
        self._check(intervention, model)
        attachment = Attachment(intervention, labels_of(intervention, self.labels), self.session)
        self._attachments.append(attachment)
        if attachment.controller.named_tasks:
            self.multi_task.keep_buffers()
        return attachment

    def _hook(self, attachment: Attachment) -> None:
        """Hook all sites of an intervention; on an error it is removed."""
        with ExitStack() as undo:
            undo.callback(self._remove, attachment)
            attachment.attach(self.session.model)
            undo.pop_all()

    def _change(self, attachment: Attachment, new: Intervention) -> None:
        """Change an intervention, unless it was removed in the meantime."""
        if attachment in self._attachments:
            trigger = attachment.intervention.when
            attachment.change(new)
            if new.when is not trigger:
                self._drop_observations(trigger)

    def _remove(self, attachment: Attachment) -> None:
        """Remove an intervention with its hooks, its states and its ledger entries."""
        if attachment in self._attachments:
            self._attachments.remove(attachment)
            self._removed += attachment.end_warnings()
            attachment.close()
            attachment.drop_records()
            self._drop_observations(attachment.intervention.when)

    def _drop_observations(self, trigger: Trigger) -> None:
        """Drop the observations of a trigger, unless another intervention reads the same."""
        others = [
            part for attachment in self._attachments for part in attachment.intervention.when.parts
        ]
        for part in trigger.parts:
            if isinstance(part, TensorTrigger) and part not in others:
                self.clock.observations.pop(part, None)

    def _find(self, label: str) -> Attachment:
        """The attachment with this label, or with a link of this label."""
        self.session.check_attached()
        self._changes.apply()
        for attachment in self._attachments:
            if label in (attachment.label, *attachment.labels):
                return attachment
        if label in self._aggregators:
            raise ValueError(f"'{label}' is an aggregator, and stays as it is until the block ends")
        labels = [attachment.label for attachment in self._attachments]
        raise LookupError(f"there is no intervention '{label}'. {nearest(label, labels)}")

    def _notice_scaler(self) -> None:
        """Warn once of a GradScaler that steps the optimizer and was not given to `attach`."""
        session, scaler = self.session, autograd.stepping_scaler()
        if scaler is None or session.scaler is scaler or session.target is None:
            return
        if self._multi_task is not None:
            self._multi_task.warn_unknown_scaler()
        session.scaler = scaler  # for interventions that are added
        for attachment in self._attachments:
            if error := attachment.intervention.loss_scale_error():
                warnings.warn(
                    f"{attachment.label}: a GradScaler makes the steps, and attach was not told of "
                    f"it. {error}. Use Parameters(stage='step'), and attach(..., scaler=scaler).",
                    SurgeryWarning,
                    stacklevel=2,
                )
                return

    # Several losses: a part that is imported and made only if it is needed.

    @property
    def multi_task(self) -> "MultiTaskBackward":
        """The aggregators, and the backward passes of several losses."""
        from gradsurg.multitask.backward import MultiTaskBackward

        if self._multi_task is None:
            self._multi_task = MultiTaskBackward(self.session, self.conflicts)
            self.stack.callback(self._multi_task.close)
        return self._multi_task

    def _add_aggregator(self, intervention: Intervention, model: nn.Module) -> None:
        from gradsurg.multitask.shared_parameters import SharedParameters

        label = labels_of(intervention, self.labels)[0]
        self._check(intervention, model)
        aggregator, at = intervention.aggregator, intervention.at
        assert aggregator is not None
        assert isinstance(at, SharedParameters)
        self.multi_task.add(label, aggregator, at, intervention.when)
        self._aggregators[label] = intervention
        for flag in intervention.flags:
            self.clock.flags.setdefault(flag.flag, flag.on)


def _close_attachments(attachments: list[Attachment]) -> None:
    """Remove all hooks, also if removing one of them fails."""
    with ExitStack() as stack:
        for attachment in attachments:
            stack.callback(attachment.close)


class _PendingChanges:
    """Apply changes of an attached surgery outside backward passes only.

    The model is held by a weak reference.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self.pending: list[Callable[[], None]] = []
        self._is_held = False
        self._forward_hook = ExitStack()

    def request(self, change: Callable[[], None]) -> None:
        """Apply a change now, or when the running backward has ended."""
        self.apply()
        if not autograd.in_backward() and not self._is_held:
            change()
            return
        model = self._model()
        if not self.pending and model is not None:
            # A backward that fails calls nothing at its end: apply before the next forward then.
            hook = model.register_forward_pre_hook(compiling.untraced(lambda *_: self.apply()))
            self._forward_hook.callback(hook.remove)
        self.pending.append(change)
        if autograd.in_backward():
            autograd.at_end_of_backward(self._end_backward)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Treat the backward passes in the block as one: apply changes at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.apply()

    def apply(self, has_ended: bool = False) -> None:
        """Apply pending changes if no backward runs, or the running one `has_ended`."""
        if not self.pending or self._is_held or (autograd.in_backward() and not has_ended):
            return
        self._forward_hook.close()
        while self.pending:
            self.pending.pop(0)()

    def close(self) -> None:
        """Drop pending changes."""
        self._forward_hook.close()
        self.pending = []

    def _end_backward(self) -> None:
        if not autograd.in_inner_backward():
            self.apply(has_ended=True)
