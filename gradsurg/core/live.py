"""The handle of an attached surgery: steps, switches, losses, and changes while it runs."""

import atexit
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod, WeakSet, finalize

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.core.attachment import Attachment
from gradsurg.core.expectations import end_warnings
from gradsurg.core.intervention import Intervention
from gradsurg.core.operation import Operation
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, warn_user
from gradsurg.plugins.messages import unknown
from gradsurg.sites.selection import one_scan
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import SKIPPED
from gradsurg.triggers.base import Clock, Trigger

if TYPE_CHECKING:
    from gradsurg.core.surgery import Surgery
    from gradsurg.multitask.conflict import Conflicts
    from gradsurg.multitask.losses import Losses
    from gradsurg.per_example.gradients import ExampleSource

_open: "WeakSet[Live]" = WeakSet()  # weak, so that a dropped handle removes its hooks at once


@atexit.register
def _close_all() -> None:
    """Close what is still attached when the program ends, with its warnings."""
    for live in list(_open):
        # Taken before `close`, which clears the list: a `close` by the user deserves no warning.
        texts = list(live.dropped_warning)
        live.close()
        _warn(texts)


def _finalize(attachment: Attachment, dropped_warning: Sequence[str]) -> None:
    attachment.close()
    _warn(dropped_warning)


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        warn_user(text)


class Live:
    """An attached surgery: its effects, its ledger, its clock, its interventions.

    PyTorch's hooks hold the `attachment`, and no part of it holds this handle. So the handle is
    freed as soon as the user drops it and the surgery, and its finalizer removes the hooks.
    """

    def __init__(self, attachment: Attachment, model: nn.Module, surgery: "Surgery") -> None:
        self.attachment = attachment
        self.effects: Effects = attachment.effects
        self.clock: Clock = attachment.clock
        # Keeps the model alive until `close`: the attachment holds it weakly.
        self._model: nn.Module | None = model
        # Weakly, as the surgery holds this handle: a cycle would wait for the garbage collector.
        self._take_back = WeakMethod(surgery.take_back)
        self.dropped_warning: list[str] = []
        """At most one text, put there by `Surgery.attach`, and emitted if this handle is dropped
        before it is entered or closed. The finalizer has this very list: clear it, never replace
        it."""
        self._finalizer = finalize(self, _finalize, attachment, self.dropped_warning)
        _open.add(self)

    @property
    def ledger(self) -> Ledger:
        """The gradients expected, seen and acted on at each site of each intervention."""
        self.attachment.enter_unmet()  # which first gets the names at which no site was met
        return self.attachment.ledger

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The attached interventions, in order, aggregators last."""
        attachment = self.attachment
        operations = (operation.intervention for operation in attachment.operations)
        return (*operations, *attachment.aggregators.values())

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels of each intervention: of its transform, or of each link of its `Chain`."""
        return tuple(self.attachment.labels)

    @property
    def conflicts(self) -> "Conflicts":
        """How much the gradients of the tasks of `backward` conflict, at the measured steps."""
        return self.attachment.conflicts

    @property
    def examples(self) -> "dict[str, ExampleSource]":
        """Numbers about the gradients of single examples, by the label of each `PerSample`."""
        sources = {each.label: each.examples for each in self.attachment.operations}
        return {label: source for label, source in sources.items() if source is not None}

    @property
    def skipped_steps(self) -> dict[str, int]:
        """The number of steps that each `SkipUpdate` has skipped, by its label."""
        return {
            label: int(self.attachment.states.get(f"{label}/group", {}).get(SKIPPED, 0))
            for each in self.attachment.operations
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

        `losses` are scalar tensors, in a dict by task name or in a list. Without an aggregator
        there is one backward of the sum, unless a `ForTask` names a task. With an aggregator each
        task is backpropagated separately, and transforms act on each. The aggregator combines the
        gradients of each group of shared parameters into one. A parameter that only one task
        reaches gets the gradient of that task, unless the task is a memory of `AGEM` or `GEM`. The
        results are added to `.grad`. Other leaves, such as an input that requires a gradient, get
        the sum over the tasks. A hook of your own on a parameter is called with the gradient of
        each task, and once more with the result.

        If the aggregator weights losses, like `Mean`, and no nonlinear transform has to act on
        each task, there is one backward of the weighted losses. So the weights also apply to
        parameters of a single task. In measured steps each task has an extra pass, which calls your
        own hooks.

        With `aggregate=False` the gradients are kept, and added to the gradients of the next call,
        so that several batches make one step. Each may have only some of the tasks, unless losses
        are weighted. Kept gradients are dropped by `discard`, by an error and by a step of the
        optimizer. With a GradScaler, give losses that it has scaled. `scale` multiplies the update,
        for example by the 1/n of a framework that accumulates n batches. The losses that
        aggregators read are not scaled. `retain_graph` is the argument of `Tensor.backward`.

        Raises TypeError or ValueError for an invalid loss, for a transform whose state would mix
        the gradients of the tasks, and, with an aggregator, for losses that share no parameter.
        """
        self.attachment.check_open()
        operations = self.attachment.operations
        self.attachment.multi_task.backward(losses, operations, scale, aggregate, retain_graph)

    def jacobian(self, losses: "Losses") -> dict[str, Tensor]:
        """Return the gradient of each of T losses by each parameter `(T, *shape)`, by name.

        `losses` are the same as for `backward`, which also lists the errors. Transforms act on the
        gradient of each task, aggregators do not; rows of a task that does not reach a parameter
        are zeros. `.grad` does not change, and the graph is kept. Only parameters that require a
        gradient are returned.
        """
        self.attachment.check_open()
        return self.attachment.multi_task.jacobian(losses, self.attachment.operations)

    @property
    def reads_example_labels(self) -> bool:
        """Whether a transform reads the labels given to `set_batch` or `set_example_labels`."""
        return any("labels" in each.intervention.needs for each in self.attachment.operations)

    def set_batch(self, **tensors: Tensor) -> None:
        """Give the batch of the backward passes until the next step, for `context.batch`.

        Any names: `live.set_batch(inputs=x, labels=y)`. Transforms such as `Route` read `labels`,
        integers (n,) of n examples or (n, time) of their tokens. The tensors are detached, not
        copied, and replace those of an earlier call: call it before each backward pass whose batch
        is another one. Raises TypeError for anything but tensors, and for labels of
        another dtype or without axes.
        """
        self.attachment.check_open()
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
        """Give the labels alone; the other tensors of `set_batch` stay."""
        self.set_batch(**{**self.clock.batch, "labels": labels})

    def discard(self) -> None:
        """Drop the gradients kept by `live.backward(..., aggregate=False)`.

        With an aggregator that weights losses, such as `Mean`, none are kept: they are in `.grad`.
        """
        if self.attachment.has_multi_task:
            self.attachment.multi_task.discard()

    def tick(self) -> None:
        """Count an optimizer step by hand; a bound optimizer counts its own steps."""
        self.attachment.tick()

    def next_epoch(self) -> None:
        """Count an epoch. Raises RuntimeError if `steps_per_epoch` counts them already.

        Triggers are asked again, as at the beginning of a step: some read the number of the epoch.
        """
        self.attachment.check_open()
        if self.clock.epoch_length is not None:
            raise RuntimeError(
                f"leave out next_epoch(): steps_per_epoch={self.clock.epoch_length} counts epochs"
            )
        self.clock.counted_epochs += 1
        for operation in self.attachment.operations:
            operation.begin_step()

    def switch(self, flag: str, *, on: bool) -> None:
        """Set the switch that `Flag(flag)` reads; takes effect at once, from any thread.

        Raises LookupError if no trigger reads it.
        """
        self.attachment.check_open()
        flags = list(dict.fromkeys(part.flag for item in self.interventions for part in item.flags))
        if flag not in flags:
            raise LookupError(unknown(f"no trigger asks for a Flag '{flag}'", flag, flags))
        if not isinstance(on, bool):
            raise TypeError(f"on: must be True or False, found {on!r}")
        # One assignment, which is safe from any thread. `Flag` is asked at each gradient, so that
        # nothing need be decided anew.
        self.clock.flags[flag] = on

    def add(self, intervention: Intervention) -> str:
        """Attach one more intervention and return its label, for `remove` and `set`.

        It acts from the next backward on; from the next forward on if it reads the batch, or hooks
        tensors in the forward, for example at Outputs. An error leaves nothing attached. Raises
        RuntimeError inside a backward pass, and so do `remove` and `set`.
        """
        attachment = self._changeable_attachment()
        if not isinstance(intervention, Intervention):
            raise TypeError(f"give gs.Intervention(transform, at), found {intervention!r}")
        if intervention.aggregator is not None:
            raise TypeError(
                f"give {intervention.transform!r} to gs.Surgery: it cannot be added in the block"
            )
        if intervention.stage == "step" and not attachment.steps.optimizers:
            raise ValueError("call live.bind(optimizer) first: stage 'step' acts in its step")
        attachment.add(intervention)
        return attachment.operations[-1].label

    def remove(self, label: str) -> None:
        """Detach an intervention, from the next backward on, and drop its state.

        Raises LookupError, listing the labels, for an unknown label.
        """
        operation = self._find(label)
        if label != operation.label:
            raise LookupError(f"use live.remove('{operation.label}'): '{label}' is a part of it")
        self.attachment.remove(operation)

    def set(self, label: str, *, when: Trigger | None = None, **changes: Any) -> None:
        """Change fields of one transform, or its trigger, from the next backward on.

        `live.set("clip", value=0.1)`, `live.set("clip", when=gs.Steps(stop=100))`. The transform
        keeps its state; a replaced trigger loses its own. Raises LookupError for an unknown label,
        ValueError for a wrong field and for a transform or a trigger that cannot act there.
        """
        operation = self._find(label)
        new = operation.intervention.changed(operation.labels, label, when, changes)
        self.attachment.set(operation, new)

    def bind(
        self, optimizer: Optimizer | Sequence[Optimizer], *, clock: Optimizer | None = None
    ) -> None:
        """Use these optimizers from now on, in place of earlier ones; states are kept.

        Each may be wrapped, for example by Accelerate or Lightning, with the optimizer as its
        `.optimizer`. Steps of `clock` are counted, by default the first optimizer's. Raises
        TypeError for an object that is not an optimizer, ValueError if stage `step` has a parameter
        that none of them holds.
        """
        self.attachment.check_open()
        self.attachment.bind(optimizer, clock)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Run interventions at stage `step` now, and not again in the next `optimizer.step()`.

        For loops that do something between the interventions and `optimizer.step()`, such as the
        clipping of a framework. It runs those of all optimizers, or of the given one. Gradients
        must be unscaled: with a GradScaler call `scaler.unscale_(optimizer)` first. Raises
        RuntimeError if they are not, ValueError if no optimizer is bound.
        """
        self.attachment.check_open()
        self.attachment.steps.run_before(optimizer, self.attachment.scaler)

    def close(self) -> None:
        """Remove all hooks, and warn about interventions that did not act; may be called again."""
        if not self._finalizer.alive:
            return  # it runs once: the surgery was closed before
        try:
            # The warnings walk the modules several times.
            with one_scan(self.attachment.model):
                warnings = list(end_warnings(self.attachment))
            # Inside the `try`: if warnings are errors, the hooks are removed all the same.
            _warn(warnings)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove all hooks without a warning, as after an error, and at the end of `close`."""
        if (take_back := self._take_back()) is not None:  # None if the surgery is gone
            take_back(self)  # first, as it reads the interventions of the open attachment
        self.dropped_warning.clear()  # the finalizer would emit it
        self._finalizer()
        self._model = None

    def _changeable_attachment(self) -> Attachment:
        """The attachment. Raises RuntimeError if it is detached, or a backward pass runs."""
        self.attachment.check_open()
        if autograd.in_backward():
            raise RuntimeError(
                "inside a backward pass: add, remove and change interventions before or after it"
            )
        return self.attachment

    def _find(self, label: str) -> Operation:
        """The operation of the intervention with this label, or with a link of this label.

        Raises LookupError, with the nearest label, if there is none, ValueError for an aggregator.
        """
        attachment = self._changeable_attachment()
        for operation in attachment.operations:
            if label in (operation.label, *operation.labels):
                return operation
        if label in attachment.aggregators:
            raise ValueError(f"give gs.Surgery another: aggregator '{label}' is fixed in the block")
        labels = [operation.label for operation in attachment.operations]
        raise LookupError(unknown(f"there is no intervention '{label}'", label, labels))

    def __enter__(self) -> Self:
        self.dropped_warning.clear()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.close()
        else:
            self.abort()
