"""Gradients may be multiplied by a loss scale."""

from collections.abc import Iterator

from gradsurg.core.pitfalls.base import (
    FULL_HOOKS,
    GRADIENTS,
    RUNNING,
    AttachmentLike,
    Cell,
    Pitfall,
)
from gradsurg.torch_internals import autograd


class LossScale(Pitfall):
    """With a GradScaler all hooks get gradients times the loss scale, except hooks of the step.

    A GradScaler leaves no mark on the model. Its `step` is looked for on the call stack of a step.

    >>> weight, scaler = torch.ones(1, requires_grad=True), torch.amp.GradScaler("cpu", 8.0)
    >>> handle = weight.register_hook(lambda grad: print(grad.item()))
    >>> scaler.scale(3 * weight).backward()
    24.0

    https://docs.pytorch.org/docs/stable/notes/amp_examples.html, "Working with Unscaled Gradients".
    """

    cells = (
        Cell(
            "loss scale", f"{RUNNING} Parameters.backward {GRADIENTS} {FULL_HOOKS}", ValueError
        ).refused(
            "{transform} depends on the size of the gradient, which the loss scale changes. "
            "Use Parameters(stage='step')."
        ),
        Cell("loss scale, not given to attach", "*").warned(
            "attach was not given the GradScaler: attach(.., scaler=scaler). {error}"
        ),
    )

    def step_ended(self, attachment: AttachmentLike) -> Iterator[str]:
        self.done.add("step_ended")
        scaler = autograd.stepping_scaler()
        if scaler is None or attachment.scaler is scaler:
            return
        attachment.scaler = scaler  # for interventions that are added
        attachment.warn_unknown_scaler()
        for operation in attachment.operations:
            if error := operation.intervention.loss_scale_error():
                text = self.text("loss scale, not given to attach", error=error)
                yield f"{operation.label}: {text}"
                return
