"""A hook that is never called says nothing."""

from collections.abc import Iterator

from gradsurg.core.pitfalls.base import (
    FULL_HOOKS,
    GRADIENTS,
    PARAMETERS,
    AttachmentLike,
    Cell,
    Operation,
    Pitfall,
)
from gradsurg.core.pitfalls.compiled import OtherCode
from gradsurg.torch_internals import compiling


class NeverCalled(Pitfall):
    """A hook is called when its gradient is computed. If none is, PyTorch says nothing.

    The loss may not depend on a tensor, the model may not call a module, or gradients may be
    disabled. An edge of a node that leads to no other node belongs to an input that needs no
    gradient.

    >>> used, unused = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> handle = unused.register_hook(lambda grad: print("called"))
    >>> used.backward()  # the hook is not called

    https://docs.pytorch.org/docs/stable/notes/autograd.html, "Locally disabling gradient
    computation".
    """

    cells = (
        Cell("the loss does not depend on a site", "*").reported(
            "no gradient passed at {sites} in the first steps"
        ),
        Cell("no_grad", f"{PARAMETERS} {GRADIENTS} {FULL_HOOKS} SavedTensors").reported(
            "no gradient is computed. Run a backward pass in the block."
        ),
        Cell("edges of a node", "Nodes.leave", LookupError).refused(
            "edge= names an input that takes no gradient. Edges that take one: {edges}."
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._was_compiled: dict[Operation, bool] = {}

    def attached(self, attachment: AttachmentLike) -> None:
        for operation in attachment.operations:
            self._was_compiled.setdefault(operation, compiling.has_compiled())

    def first_steps_ended(self, attachment: AttachmentLike) -> None:
        attachment.enter_unmet()
        for operation in attachment.operations:
            label = operation.label
            entries = attachment.ledger.of(label)
            has_acted = any(entry.all_calls or entry.is_traced for entry in entries)
            if operation.answer is not False and operation.stage != "captured" and not has_acted:
                sites = attachment.ledger.silent(label) or "any site"
                text = self.text("the loss does not depend on a site", sites=sites)
                reason = self._reason(attachment, operation) or ". Does the loss depend on it?"
                attachment.warn_once(f"{label}: {text}{reason}", key=f"{label} silent")

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        attachment.enter_unmet()
        reasons = {each.label: self._reason(attachment, each) for each in attachment.operations}
        for label in [*attachment.ledger.sites]:
            reason = reasons.get(label, "")
            yield from attachment.ledger.warnings(label, attachment.first_step, reason)
        for label, reason in reasons.items():
            if not attachment.ledger.of(label):
                text = "none of its sites was reached. Call the model inside the block"
                yield f"{label}: {text}{reason}"

    def _reason(self, attachment: AttachmentLike, operation: Operation) -> str:
        """Why hooks may not have run; empty if nothing explains it."""
        if operation.stage == "step" and not attachment.steps.optimizers:
            return ". It acts at stage 'step': call live.bind(optimizer) in the block"
        if not self._was_compiled.get(operation):
            return ""
        has_acted = any(entry.all_calls for entry in attachment.ledger)
        return OtherCode.reason(attachment.model, attachment.is_compiled, has_acted)
