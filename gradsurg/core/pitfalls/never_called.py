"""A hook that is never called says nothing."""

from collections.abc import Iterator
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsurg.core.pitfalls.base import ENOUGH, AttachmentLike, Operation, Pitfall, params_of
from gradsurg.core.pitfalls.compiled import LateHooks
from gradsurg.core.pitfalls.discarded_hooks import DiscardedHooks
from gradsurg.core.pitfalls.uncounted_steps import OtherOptimizer, uncounted
from gradsurg.torch_internals import autograd, compiling

WATCHED = 8  # parameters, spread over the model
ENTRIES = 64  # of each, by which it is seen that its value has changed


class NeverCalled(Pitfall):
    """The loss may not depend on a tensor, or the model may not call a module.

    >>> used, unused = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> handle = unused.register_hook(lambda grad: print("called"))
    >>> used.backward()  # the hook is not called

    The steps in which nothing acts are seen by the optimizer's steps, or, where none are counted,
    by a few parameters that have changed twice between backward passes.
    """

    context, kinds, outcome = "the loss does not depend on a site", "*", "reported"
    why = "attached, and in the first steps no gradient has passed at: {sites}"

    def __init__(self) -> None:
        super().__init__()
        self._attachment: ref[AttachmentLike] | None = None
        self._start = 0, 0
        self._was_compiled: dict[Operation, bool] = {}
        self._counted = 0
        self._seen: dict[int, _Seen] = {}  # the watched parameters that had a gradient
        self._watched: set[int] = set()

    def attached(self, attachment: AttachmentLike) -> None:
        for operation in attachment.operations:
            self._was_compiled.setdefault(operation, compiling.has_compiled())
        if self._attachment is not None:
            return
        self._attachment, clock = ref(attachment), attachment.clock
        self._start = clock.step, clock.counted_epochs
        # A surgery that changes weights in each forward hides whether a step has changed them.
        if not any(
            each.stage == "forward" and each.intervention.at.changed_tensors == "weights"
            for each in attachment.operations
        ):
            params = params_of(attachment.model)
            trained = [p for p in params if p.requires_grad and not is_lazy(p)]
            watched = trained[:: -(-len(trained) // WATCHED) or 1]
            self._watched = {id(param) for param in watched}
            for param in watched:
                self.stack.callback(param.register_post_accumulate_grad_hook(self._see).remove)

    def step_ended(self, attachment: AttachmentLike) -> None:
        self._counted += 1
        if self._counted == ENOUGH:
            self.done.add("step_ended")
            self._tell()

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        attachment.expect_unmet()
        operations = {each.label: each for each in attachment.operations}
        reasons = {label: self._reason(attachment, each) for label, each in operations.items()}
        for label in [*attachment.ledger.sites]:
            yield from attachment.ledger.warnings(label, self._start[0], reasons.get(label, ""))
        for label, reason in reasons.items():
            if not attachment.ledger.of(label):
                text = "attached, but none of its sites was met: was the model called?"
                yield f"{label}: {text}{reason}"
        if any(entry.calls for entry in attachment.ledger):
            yield from uncounted(attachment, *self._start)

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
                autograd.at_end_of_backward(self._tell)

    def _is_stepped(self, param: Tensor, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether the optimizer whose steps should be counted has it, or none of the watched."""
        groups = optimizer.param_groups if optimizer else ()
        held = {id(each) for group in groups for each in group["params"]}
        return id(param) in held or held.isdisjoint(self._watched)

    def _tell(self) -> None:
        """Tell what has not acted in the first steps, and if none were counted."""
        self.stack.close()
        self._seen.clear()
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None:
            return
        attachment.expect_unmet()
        for act in attachment.at_first_steps:
            act()
        optimizer = attachment.steps.clock
        if optimizer is not None and not self._counted:
            text = OtherOptimizer.sentences(optimizer=type(optimizer).__name__)
            attachment.warn_once(text.rstrip("."), key="no step")
        for text in DiscardedHooks.texts(attachment):
            attachment.warn_once(text)
        for operation in attachment.operations:
            label = operation.label
            entries = attachment.ledger.of(label)
            has_acted = any(entry.all_calls or entry.is_traced for entry in entries)
            if operation.answer is not False and operation.stage != "captured" and not has_acted:
                sites = attachment.ledger.silent(label) or "any site"
                text = f"{label}: {self.why.format(sites=sites)}"
                reason = self._reason(attachment, operation)
                attachment.warn_once(f"{text}{reason}", key=f"{label} silent")
        if not self._counted:
            for text in uncounted(attachment, *self._start, with_epochs=False):
                attachment.warn_once(text)

    def _reason(self, attachment: AttachmentLike, operation: Operation) -> str:
        """Why hooks may not have run; empty if nothing explains it."""
        if operation.stage == "step" and not attachment.steps.optimizers:
            return ". It acts at stage 'step', and live.bind(optimizer) was not called"
        if not self._was_compiled.get(operation):
            return ""
        has_acted = any(entry.all_calls for entry in attachment.ledger)
        return LateHooks.reason(attachment.model, attachment.is_compiled, has_acted)


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
