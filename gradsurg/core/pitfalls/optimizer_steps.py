"""Step hooks belong to one optimizer, and run only around its `step`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsurg.core.pitfalls.base import AttachmentLike, Cell, Pitfall
from gradsurg.torch_internals import autograd
from gradsurg.triggers.epochs import Epochs

ENOUGH = 2  # steps after which interventions that have not acted are reported
WATCHED = 8  # parameters in which changes are noticed, spread over the model
ENTRIES = 64  # of each of these parameters, compared to notice that its value has changed


class StepHooks(Pitfall):
    """A step hook is called by `optimizer.step`, and by nothing else that changes the weights.

    Wrappers of an optimizer may have a `step` of their own, and the training loop counts epochs.
    LBFGS computes many gradients in a step, and curvature from the differences of its weights. The
    step of each of several optimizers ends before the next one begins.

    Steps that are not counted are noticed by a few parameters, which have changed twice between
    backward passes.

    >>> weight = torch.ones(1, requires_grad=True); optimizer = torch.optim.LBFGS([weight])
    >>> handle = optimizer.register_step_pre_hook(lambda *_: print("step"))
    >>> with torch.no_grad(): weight -= 0.1  # the hook is not called
    >>> def closure(): optimizer.zero_grad(); weight.exp().backward(); return weight.exp()
    >>> loss = optimizer.step(closure)  # calls the closure up to 25 times
    step

    https://docs.pytorch.org/docs/stable/optim.html, `Optimizer.register_step_pre_hook`.
    """

    cells = (
        Cell("LBFGS", "Parameters", ValueError).refused(
            "the intervention may skip a step, and LBFGS moves parameters even without gradients. "
            "Use another optimizer."
        ),
        Cell("LBFGS", "Updates MatchedUpdates", ValueError).refused(
            "LBFGS computes curvature from its own updates. Use another optimizer."
        ),
        Cell("several optimizers", "Updates MatchedUpdates Weights", ValueError).refused(
            "the transform needs all of its parameters at once, and two optimizers hold them. "
            "Use an intervention for the parameters of each optimizer."
        ),
        Cell("no optimizer", "*").warned(
            "{triggers}: no optimizer step was counted{since}. Use attach(model, optimizer) or "
            "live.bind(optimizer); without an optimizer of torch call live.tick() after each step"
        ),
        Cell("epochs", "*").warned(
            "Epochs: no epoch was counted. Use Epochs(length=..), attach(.., steps_per_epoch=..), "
            "or live.next_epoch() after each epoch"
        ),
        Cell("another optimizer", "*").warned(
            "no step of {optimizer} was counted, though the weights have changed. Call live.bind "
            "with the optimizer that steps, or live.before_step() and live.tick() around each step"
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._attachment: ref[AttachmentLike] | None = None
        self._epochs = 0  # counted when it was attached
        self._counted = 0
        self._watched: set[int] = set()
        self._seen: dict[int, _Seen] = {}  # the watched parameters that had a gradient
        self._changed: set[int] = set()

    def attached(self, attachment: AttachmentLike) -> None:
        self.done.add("attached")
        self._attachment, self._epochs = ref(attachment), attachment.clock.counted_epochs
        # A surgery that changes weights in each forward hides whether a step has changed them.
        if not any(
            each.stage == "forward" and each.intervention.at.changed_tensors == "weights"
            for each in attachment.operations
        ):
            params = attachment.params_of(attachment.model)
            trained = [each.thing for each in params if not each.is_frozen]
            for param in trained[:: -(-len(trained) // WATCHED) or 1]:
                if not is_lazy(param):
                    self._watched.add(id(param))
                    self.stack.callback(param.register_post_accumulate_grad_hook(self._see).remove)

    def step_ended(self, attachment: AttachmentLike) -> None:
        self._counted += 1
        if self._counted == ENOUGH:
            self.done.add("step_ended")
            self._end_first_steps()

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        if any(entry.calls for entry in attachment.ledger):
            yield from self._uncounted(attachment)
            clock, parts = attachment.clock, _parts(attachment)
            has_moved = clock.epoch_length is not None or clock.counted_epochs > self._epochs
            if not has_moved and any(
                isinstance(each, Epochs) and not each.length for each in parts
            ):
                yield self.text("epochs")

    def _uncounted(self, attachment: AttachmentLike) -> Iterator[str]:
        """Yield a text about triggers whose clock has not advanced since the surgery began."""
        clock, start = attachment.clock, attachment.first_step
        timed = {
            type(each).__name__
            for each in _parts(attachment)
            if each.step_based or (isinstance(each, Epochs) and (clock.epoch_length or each.length))
        }
        if timed and clock.step == start:
            since = f" since this block began, at step {start}" if start else ""
            yield self.text("no optimizer", triggers=", ".join(sorted(timed)), since=since)

    def _see(self, param: Tensor) -> None:
        """Notice at a gradient of a watched parameter whether it has changed since the last."""
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None or self._counted or attachment.steps.is_stepping:
            return  # it is stepping in the closures of LBFGS
        key, version = id(param), autograd.version_of(param)
        if key not in self._seen:
            self._seen[key] = _Seen(version, _entries(param).clone())
        seen, clock = self._seen[key], attachment.steps.clock
        if version == seen.version or not self._is_stepped(param, clock):
            return
        seen.version, seen.changes = version, seen.changes + 1
        # With an optimizer only at every second change: SAM moves the weights and moves them back.
        if seen.changes % (ENOUGH if clock else 1):
            return
        # A version alone may change without a step, for example by weights that are noisy in each
        # forward, and a single value, for example in a table that is normalized in each forward.
        now = _entries(param).to(seen.entries)  # the model may have moved since
        has_changed = param.is_meta or not torch.allclose(seen.entries, now)
        (self._changed.add if has_changed else self._changed.discard)(key)
        if len(self._changed) >= min(2, len(self._seen)):
            autograd.at_end_of_backward(self._end_first_steps)

    def _is_stepped(self, param: Tensor, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether the optimizer whose steps should be counted has it, or none of the watched."""
        groups = optimizer.param_groups if optimizer else ()
        held = {id(each) for group in groups for each in group["params"]}
        return id(param) in held or held.isdisjoint(self._watched)

    def _end_first_steps(self) -> None:
        """Tell the other pitfalls that steps have ended, and warn if none were counted."""
        self.stack.close()
        self._seen.clear()
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None:
            return
        if attachment.steps.clock is not None and not self._counted:
            name = type(attachment.steps.clock).__name__
            attachment.warn_once(self.text("another optimizer", optimizer=name), key="no step")
        for act in attachment.at_first_steps:
            act()
        attachment.tell("first_steps_ended")
        for text in () if self._counted else self._uncounted(attachment):
            attachment.warn_once(text)


@dataclass
class _Seen:
    """A watched parameter: its version at its last gradient, some entries at its first."""

    version: int
    entries: Tensor
    changes: int = 0


def _entries(param: Tensor) -> Tensor:
    tensor = param.detach()
    # Any: a DTensor, whose module is slow to import.
    tensor = cast(Any, tensor).to_local() if autograd.is_sharded(tensor) else tensor
    return tensor.reshape(-1)[:ENTRIES]


def _parts(attachment: AttachmentLike) -> Iterator[Any]:  # Any: of any trigger
    """Yield the parts of the triggers of all interventions."""
    for operation in attachment.operations:
        yield from operation.intervention.when.parts
