"""Step hooks belong to one optimizer, see its step from outside, and may not be called."""

from collections.abc import Iterator
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsurg.core.pitfalls.base import AttachmentLike, Pitfall, refused, warned
from gradsurg.torch_internals import autograd
from gradsurg.triggers.epochs import Epochs

ENOUGH = 2  # steps after which it is told what has not acted
WATCHED = 8  # parameters, spread over the model
ENTRIES = 64  # of each, by which it is seen that its value has changed


class SeveralSteps(Pitfall):
    """A step hook is called once for a step in which LBFGS computes gradients many times.

    LBFGS computes curvature from the difference of its weights and of their gradients. The step of
    each of several optimizers ends before that of the next begins.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = torch.optim.LBFGS([weight])
    >>> handle = optimizer.register_step_pre_hook(lambda *_: print("step"))
    >>> def closure(): optimizer.zero_grad(); weight.exp().backward(); return weight.exp()
    >>> loss = optimizer.step(closure)  # calls the closure up to 25 times
    step

    https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html
    """

    rows: ClassVar = {
        ("LBFGS", "Parameters"): refused(
            "LBFGS also steps without gradients, so that no step of it can be skipped. "
            "Choose another optimizer.",
            ValueError,
        ),
        ("LBFGS", "Updates MatchedUpdates"): refused(
            "cannot act on LBFGS, which computes curvature from its own updates.", ValueError
        ),
        ("several optimizers", "Updates MatchedUpdates Weights"): refused(
            "the transform needs a whole group at once, and two optimizers share it. "
            "Select the parameters of each in an intervention of its own.",
            ValueError,
        ),
    }


class UncountedSteps(Pitfall):
    """A step hook is called by `optimizer.step`, and by nothing else that changes the weights.

    Wrappers of an optimizer may have a `step` of their own, and the training loop counts epochs.
    Steps that are not counted are seen by a few parameters that have changed twice between backward
    passes.

    >>> weight = torch.ones(1, requires_grad=True); optimizer = torch.optim.SGD([weight])
    >>> handle = optimizer.register_step_post_hook(lambda *_: print("step"))
    >>> with torch.no_grad(): weight -= 0.1  # the hook is not called

    https://docs.pytorch.org/docs/stable/optim.html, `Optimizer.register_step_post_hook`.
    """

    rows: ClassVar = {
        ("no optimizer", "*"): warned(
            "{triggers}: no optimizer step was counted{since}; attach(model, optimizer), "
            "live.bind(optimizer) or call live.tick() after each step"
        ),
        ("epochs", "*"): warned(
            "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, or "
            "call live.next_epoch()"
        ),
        ("another optimizer", "*"): warned(
            "no step of {optimizer} was counted, though the weights have changed: it is not what "
            "makes the steps, or a wrapper of it runs no step hooks. "
            "Bind the optimizer that steps, or call live.before_step() and live.tick()"
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._attachment: ref[AttachmentLike] | None = None
        self._start = 0, 0
        self._counted = 0
        self._watched: set[int] = set()
        self._seen: dict[int, _Seen] = {}  # those of the watched that had a gradient

    def attached(self, attachment: AttachmentLike) -> None:
        if self._attachment is not None:
            return
        self._attachment, clock = ref(attachment), attachment.clock
        self._start = clock.step, clock.counted_epochs
        # A surgery that changes weights in each forward hides whether a step has changed them.
        if not any(
            each.stage == "forward" and each.intervention.at.changed_tensors == "weights"
            for each in attachment.operations
        ):
            trained = [param for param in attachment.params if param.requires_grad]
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
            triggers = [operation.intervention.when for operation in attachment.operations]
            counting = [
                part for each in triggers for part in each.parts if isinstance(part, Epochs)
            ]
            clock = attachment.clock
            has_moved = clock.epoch_length is not None or clock.counted_epochs > self._start[1]
            if any(part.length is None for part in counting) and not has_moved:
                yield self.text("epochs")

    def _uncounted(self, attachment: AttachmentLike) -> Iterator[str]:
        """Yield a text about triggers whose clock has not advanced since the surgery began."""
        clock, start = attachment.clock, self._start[0]
        triggers = [operation.intervention.when for operation in attachment.operations]
        timed = {
            type(part).__name__
            for trigger in triggers
            for part in trigger.parts
            if part.step_based
            or (isinstance(part, Epochs) and (clock.epoch_length or part.length) is not None)
        }
        if timed and clock.step == start:
            since = f" since this block began, at step {start}" if start else ""
            yield self.text("no optimizer", triggers=", ".join(sorted(timed)), since=since)

    def _see(self, param: Tensor) -> None:
        """Notice at a gradient of a watched parameter whether it has changed since the last."""
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None or self._counted or attachment.steps.is_stepping:
            return  # it is stepping in the closures of LBFGS
        version, seen = autograd.version_of(param), self._seen.get(id(param))
        if seen is None:
            self._seen[id(param)] = _Seen(param, version)
        elif version != seen.version and self._is_stepped(param, attachment.steps.clock):
            seen.version, seen.changes = version, seen.changes + 1
            if seen.changes < (ENOUGH if attachment.steps.clock else 1):
                return
            seen.changes, seen.has_changed = 0, seen.differs(param)
            # A single one may be a table that is normalized in each forward.
            if sum(each.has_changed for each in self._seen.values()) >= min(2, len(self._seen)):
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
        optimizer = attachment.steps.clock
        if optimizer is not None and not self._counted:
            text = self.text("another optimizer", optimizer=type(optimizer).__name__)
            attachment.warn_once(text, key="no step")
        for act in attachment.at_first_steps:
            act()
        attachment.tell("first_steps_ended")
        for text in () if self._counted else self._uncounted(attachment):
            attachment.warn_once(text)


class _Seen:
    """A watched parameter: its version at its last gradient, some entries at its first.

    A version alone may change without a step, as by weights that are noisy in each forward.
    """

    def __init__(self, param: Tensor, version: int) -> None:
        self.version, self.changes, self.has_changed = version, 0, False
        self.entries = _entries(param).clone()

    def differs(self, param: Tensor) -> bool:
        """Whether they differ by more than rounding from those at first; true on `meta`."""
        now = _entries(param).to(self.entries)  # the model may have moved since
        return param.is_meta or not torch.allclose(self.entries, now)


def _entries(param: Tensor) -> Tensor:
    tensor = param.detach()
    # Any: a DTensor, whose module is slow to import.
    tensor = cast(Any, tensor).to_local() if autograd.is_sharded(tensor) else tensor
    return tensor.reshape(-1)[:ENTRIES]
