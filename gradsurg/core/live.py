"""The handle of an attached surgery: steps, switches, losses, and changes while it runs."""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod, WeakSet, finalize

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.core.attached import Attached
from gradsurg.core.coverage import clock_warnings, unhooked_warnings
from gradsurg.core.first_steps import ENOUGH, FirstSteps
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.observers import observed_modules
from gradsurg.core.session import Session, warn_user
from gradsurg.plugins.messages import nearest
from gradsurg.sites.wrapped_models import late_hooks_reason
from gradsurg.torch_internals import autograd
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
        self._attached: list[Attached] = []
        self._aggregators: dict[str, Intervention] = {}  # by label
        self._removed: list[str] = []  # the detach warnings of interventions that were removed
        self._multi_task: MultiTaskBackward | None = None
        self._has_stepped = False
        self._start = clock.step, clock.counted_epochs
        self._is_compiled = is_compiled
        session.effects.begin(clock.step)
        self._first_steps: FirstSteps | None = None
        # Weak: the surgery holds this object.
        self.on_end: Callable[[], Callable[[Live], None] | None] = lambda: None
        # What removes the hooks must not refer to this object, which would never be garbage then.
        self.stack = ExitStack()
        self.stack.callback(session.close)
        self.stack.callback(_close_attached, self._attached)
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
        return (*(each.intervention for each in self._attached), *self._aggregators.values())

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels of the links of each intervention."""
        return (*(each.labels for each in self._attached), *((a,) for a in self._aggregators))

    @cached_property
    def conflicts(self) -> "Conflicts":
        """How much the gradients of the tasks of `backward` conflict, at the measured steps."""
        from gradsurg.multitask.conflict import Conflicts

        return Conflicts()

    @property
    def examples(self) -> "dict[str, ExampleSource]":
        """Numbers about the gradients of single examples, by the label of each `PerSample`."""
        sources = {each.label: each.examples for each in self._attached}
        return {label: source for label, source in sources.items() if source is not None}

    @property
    def skipped_steps(self) -> dict[str, int]:
        """The number of steps that each `SkipUpdate` has skipped, by its label."""
        return {
            label: int(self.session.states.get(f"{label}/group", {}).get(SKIPPED, 0))
            for each in self._attached
            for label, link in zip(each.labels, each.intervention.links, strict=True)
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
        gradient of that task, unless the task is a memory of `AGEM` or `GEM`. The results are added
        to `.grad`. Other leaves, as an input that requires a gradient, get the sum. Your own hook
        on a parameter is called for each task, and for the result.

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
        self.multi_task.backward(losses, self._attached, scale, aggregate, retain_graph)

    def jacobian(self, losses: "Losses") -> dict[str, Tensor]:
        """Return the gradient of each of T losses by each parameter `(T, *shape)`, by name.

        `losses` are those of `backward`. Transforms act on the gradient of each task, aggregators
        do not; rows of a task that does not reach a parameter are zeros. `.grad` does not change,
        and the graph is kept. Only parameters that require a gradient are returned. Raises as
        `backward` does.
        """
        self.session.check_attached()
        return self.multi_task.jacobian(losses, self._attached)

    @property
    def reads_example_labels(self) -> bool:
        """Whether a transform reads the labels given to `set_batch` or `set_example_labels`."""
        return any("labels" in each.intervention.needs for each in self._attached)

    def set_batch(self, **tensors: Tensor) -> None:
        """Give the batch of the next backward passes, until a step ends: `context.batch`.

        Any names: `live.set_batch(inputs=x, labels=y)`. Transforms as `Route` read `labels`,
        integers (n,) of n examples or (n, time) of their tokens. The tensors are detached, not
        copied, and replace those of an earlier call: call it before each backward pass whose batch
        is another one. Raises TypeError for anything but tensors, and for other labels.
        """
        self.session.check_attached()
        for name, tensor in tensors.items():
            kind = "a tensor of integers" if name == "labels" else "a tensor"
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: must be {kind}, found {tensor!r}")
        labels = tensors.get("labels")
        if labels is not None and (
            not labels.ndim or labels.is_floating_point() or labels.is_complex()
        ):
            found = f"{labels.dtype} of shape {list(labels.shape)}"
            raise TypeError(f"labels: must be integers of shape [n] or [n, time], found {found}")
        self.clock.batch = {name: tensor.detach() for name, tensor in tensors.items()}

    def set_example_labels(self, labels: Tensor) -> None:
        """Give the labels alone, as `set_batch` does; its other tensors stay."""
        self.set_batch(**{**self.clock.batch, "labels": labels})

    def discard(self) -> None:
        """Drop the gradients kept by `live.backward(..., aggregate=False)`.

        With an aggregator that weights losses, as `Mean`, none are kept: they are in `.grad`.
        """
        if self._multi_task is not None:
            self._multi_task.discard()

    def tick(self) -> None:
        """Count an optimizer step; called by a hook of the optimizer given to `attach`."""
        if self._multi_task is not None:
            self._multi_task.after_step()
        if not self._has_stepped:
            self._has_stepped = True
            self._notice_scaler()
        clock = self.clock
        clock.step += 1
        clock.backwards = 0
        clock.error, clock.batch = None, {}
        self.effects.begin(clock.step)
        if (first := self._first_steps) is not None:
            if clock.step - self._start[0] <= ENOUGH:
                first.count()
            else:  # past them, also by a state that was loaded or a stack, which counts by itself
                first.close()
                self._first_steps = None
        for each in self._attached:
            each.begin_step()

    def next_epoch(self) -> None:
        """Count an epoch. Raises RuntimeError if `steps_per_epoch` counts them already."""
        if self.clock.epoch_length is not None:
            raise RuntimeError(
                f"epochs are counted already: steps_per_epoch={self.clock.epoch_length}"
            )
        self.clock.counted_epochs += 1
        for each in self._attached:
            each.firing.begin_step()

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
        forward, as Outputs does, or reads the batch. An error leaves nothing attached. Raises
        RuntimeError inside a backward pass, as `remove` and `set` do.
        """
        self._check_idle()
        each = self.admit(intervention)
        with ExitStack() as undo:
            undo.callback(self._drop, each)
            each.attach()
            undo.pop_all()
        return each.label

    def remove(self, label: str) -> None:
        """Detach an intervention, from the next backward on, and drop its state.

        Raises LookupError, listing the labels, unless one is `label`.
        """
        each = self._find(label)
        if label != each.label:
            raise LookupError(f"'{label}' is a link of '{each.label}': remove the whole")
        self._drop(each)

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or its trigger, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform
        keeps its state; a replaced trigger loses its own. Raises LookupError for an unknown label,
        ValueError for a wrong field and for a transform or a trigger that cannot act there.
        """
        each = self._find(label)
        trigger = each.intervention.when
        new = each.intervention.changed(each.labels, label, when, changes)
        self._check(new, replaced=each)
        each.change(new)
        if new.when is not trigger:
            self._drop_observations(trigger)

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
            for place, each in enumerate(self._attached):
                if each.stage == "step":
                    each.close()
                    renewed = Attached(each.intervention, each.labels, self.session)
                    renewed.notes = each.notes
                    self._attached[place] = renewed
                    renewed.attach()
                else:
                    each.firing.set(each.intervention)
            undo.pop_all()

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
            _warn(list(self._end_warnings()))
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove all hooks without a warning: an error has ended the training."""
        if (on_end := self.on_end()) is not None:
            on_end(self)
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

    # Called by Surgery.

    def watch(self) -> None:
        """Notice in the first steps what does not act; called when all is hooked."""
        session = self.session
        # A surgery that changes weights in each forward hides whether a step has changed them.
        hides = any(
            each.stage == "forward" and each.intervention.at.changed_tensors == "weights"
            for each in self._attached
        )
        params = () if hides else session.model.parameters()
        self._first_steps = FirstSteps(params, session.steps, self._tell)
        self.stack.callback(self._first_steps.close)

    def admit(self, intervention: Intervention) -> Attached:
        """Check an intervention and reserve its labels; nothing is hooked yet."""
        if not isinstance(intervention, Intervention):
            raise TypeError(f"a surgery takes Interventions, found {intervention!r}")
        if intervention.aggregator is not None:
            raise TypeError(
                f"{intervention.transform!r}: an aggregator is attached when the block begins"
            )
        self._check(intervention)
        each = Attached(intervention, labels_of(intervention, self.labels), self.session)
        self._attached.append(each)
        if each.firing.named_tasks:
            self.multi_task.keep_buffers()
        return each

    def add_aggregator(self, intervention: Intervention) -> None:
        """Attach an aggregator. Raises as `Intervention` and `SharedParameters` say."""
        from gradsurg.multitask.shared_parameters import SharedParameters

        label = labels_of(intervention, self.labels)[0]
        self._check(intervention)
        aggregator, at = intervention.aggregator, intervention.at
        assert aggregator is not None
        assert isinstance(at, SharedParameters)
        self.multi_task.add(label, aggregator, at, intervention.when)
        self._aggregators[label] = intervention
        for flag in intervention.flags:
            self.clock.flags.setdefault(flag.flag, flag.on)

    @property
    def multi_task(self) -> "MultiTaskBackward":
        """The aggregators, and the backward passes of several losses; made when it is needed."""
        from gradsurg.multitask.backward import MultiTaskBackward

        if self._multi_task is None:
            self._multi_task = MultiTaskBackward(self.session, self.conflicts)
            self.stack.callback(self._multi_task.close)
        return self._multi_task

    def load_states(self) -> None:
        """Take over the states and the step of the session."""
        self.effects.begin(self.clock.step)
        for each in self._attached:
            each.load_states()

    # Warnings.

    def _tell(self, counted: int) -> None:
        """Warn in the first steps of an intervention that has not acted, and of a still clock.

        `counted` is the number of steps so far.
        """
        if self.session.shadow and not self.effects.every:
            return
        clock = self.session.steps.clock
        if clock is not None and not counted:
            self.session.warn_once(
                f"no step of {type(clock).__name__} was counted, though the weights have "
                "changed: it is not what makes the steps, or a wrapper of it runs no step hooks. "
                "Bind the optimizer that steps, or call live.before_step() and live.tick()",
                key="no step",
            )
        for each in self._attached:
            if text := each.discarded_hooks():
                self.session.warn_once(f"{each.label}: {text}")
            entries = self.ledger.of(each.label)
            if each.firing.answer is False or any(entry.all_calls for entry in entries):
                continue
            if each.stage != "captured":
                silent = self.ledger.silent(each.label) or "any site"
                self.session.warn_once(
                    f"{each.label}: attached, and in the first steps no gradient has passed at: "
                    f"{silent}{self._reason(each)}",
                    key=f"{each.label} silent",
                )
        if self._multi_task is not None:
            of_tasks = (each for each in self._attached if each.firing.named_tasks)
            idle = [each.label for each in of_tasks if each.firing.answer is False]
            self._multi_task.warn_unused([*self._aggregators, *idle])
        if not counted:
            for text in self._clock_warnings(with_epochs=False):
                self.session.warn_once(text)

    def _end_warnings(self) -> Iterator[str]:
        """Yield the warnings to emit on detach, but for those that were told in the first steps."""
        session = self.session
        if session.shadow and not self.effects.every:
            return  # nothing acts and nothing is measured
        labels = {each.label: each for each in self._attached}
        for label in [*self.ledger.sites]:
            each = labels.get(label)
            reason = "" if each is None else self._reason(each)
            yield from self.ledger.warnings(label, self._start[0], reason)
        for each in self._attached:
            if not self.ledger.of(each.label):
                yield (
                    f"{each.label}: attached, but none of its sites was met: was the model called?"
                    f"{self._reason(each)}"
                )
        yield from self._removed
        if self._multi_task is not None:
            yield from self._multi_task.closing_warnings()
        for each in self._attached:
            yield from each.end_warnings()
        if any(entry.calls for entry in self.ledger):
            told = session.warned
            yield from (text for text in self._clock_warnings() if text not in told)
        hooked = [each.coverage for each in self._attached if not self._waits(each)]
        yield from unhooked_warnings(hooked, session.model)

    def _clock_warnings(self, with_epochs: bool = True) -> Iterator[str]:
        triggers = [each.intervention.when for each in self._attached]
        return clock_warnings(triggers, self.clock, self._start, with_epochs)

    def _waits(self, each: Attached) -> bool:
        """Whether an intervention waits for `bind`."""
        return each.stage == "step" and not self.session.steps.optimizers

    def _reason(self, each: Attached) -> str:
        """Why hooks may not have run; empty if nothing explains it."""
        if self._waits(each):
            return ". It acts at stage 'step', and live.bind(optimizer) was not called"
        if not each.was_compiled:
            return ""
        has_acted = any(entry.all_calls for entry in self.ledger)
        return late_hooks_reason(self.session.model, self._is_compiled, has_acted)

    # Helpers.

    def _flags(self, without: Attached | None = None) -> list[Flag]:
        """The switches that the triggers read, now or after pending changes."""
        flags = [
            flag
            for each in self._attached
            if each is not without
            for flag in each.intervention.flags
        ]
        return flags + [flag for item in self._aggregators.values() for flag in item.flags]

    def _check_idle(self) -> None:
        """Raise RuntimeError if the surgery is detached, or a backward pass runs."""
        self.session.check_attached()
        if autograd.in_backward():
            raise RuntimeError(
                "inside a backward pass: add, remove and change interventions before or after it"
            )

    def _check(self, intervention: Intervention, replaced: Attached | None = None) -> None:
        """Raise an error for an intervention that cannot act, in the place of `replaced`."""
        if self.session.scaler is not None:
            intervention.check_loss_scale(self.session.scaler)
        if intervention.aggregator is None:
            model = self.session.model
            intervention.check_sites(model, intervention.at.find(model))
            if intervention.forward_triggers:
                observed_modules(intervention.forward_triggers, model)
        if not intervention.flags:
            return
        first = {flag.flag: flag.on for flag in self._flags(without=replaced)}
        for flag in intervention.flags:
            if first.setdefault(flag.flag, flag.on) != flag.on:
                raise ValueError(f"{flag!r}: another trigger has this switch as on={not flag.on}")

    def _drop(self, each: Attached) -> None:
        """Remove an intervention with its hooks, its states and its ledger entries."""
        self._attached.remove(each)
        self._removed += each.end_warnings()
        each.close()
        each.drop_records()
        self._drop_observations(each.intervention.when)

    def _drop_observations(self, trigger: Trigger) -> None:
        """Drop the observations of a trigger, unless another intervention reads the same."""
        others = [part for each in self._attached for part in each.intervention.when.parts]
        for part in trigger.parts:
            if isinstance(part, TensorTrigger) and part not in others:
                self.clock.observations.pop(part, None)

    def _find(self, label: str) -> Attached:
        """The attached intervention with this label, or with a link of this label."""
        self._check_idle()
        for each in self._attached:
            if label in (each.label, *each.labels):
                return each
        if label in self._aggregators:
            raise ValueError(f"'{label}' is an aggregator, and stays as it is until the block ends")
        labels = [each.label for each in self._attached]
        raise LookupError(f"there is no intervention '{label}'. {nearest(label, labels)}")

    def _notice_scaler(self) -> None:
        """Warn once of a GradScaler that steps the optimizer and was not given to `attach`."""
        session, scaler = self.session, autograd.stepping_scaler()
        if scaler is None or session.scaler is scaler or session.target is None:
            return
        if self._multi_task is not None:
            self._multi_task.warn_unknown_scaler()
        session.scaler = scaler  # for interventions that are added
        errors = ((each.label, each.intervention.loss_scale_error()) for each in self._attached)
        for label, error in errors:
            if error:
                warn_user(
                    f"{label}: a GradScaler makes the steps, and attach was not told of it. "
                    f"{error}. Use Parameters(stage='step'), and attach(..., scaler=scaler)."
                )
                return


def _close_attached(attached: Sequence[Attached]) -> None:
    """Remove all hooks, also if removing one of them fails."""
    with ExitStack() as stack:
        for each in attached:
            stack.callback(each.close)
