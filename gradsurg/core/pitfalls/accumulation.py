"""The gradient of a step is the sum of several."""

from gradsurg.core.pitfalls.base import (
    RUNNING,
    AttachmentLike,
    Cell,
    Operation,
    Pitfall,
    SiteHook,
)


class PartsOfASum(Pitfall):
    """A hook of a parameter gets the gradient of each backward pass separately.

    Unless a function is linear, its results for the parts do not add up to that for the sum. A hook
    after accumulation gets the parameter, with the sum of all passes so far in `.grad`. If it
    writes to `.grad`, the next pass adds to the result.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> first = weight.register_hook(lambda grad: grad.clamp(max=1))
    >>> last = weight.register_post_accumulate_grad_hook(lambda weight: print(weight.grad.item()))
    >>> for _ in range(2): (3 * weight).backward()
    1.0
    2.0

    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
    https://github.com/pytorch/pytorch/issues/187268 is about the argument of the second hook.
    """

    cells = (
        Cell("accumulation", RUNNING).warned(
            "each backward pass transforms .grad again, with the earlier results in it. "
            "Use stage='step' for the sum of all passes, or stage='backward' for each pass."
        ),
        Cell("accumulation, not linear", f"{RUNNING} Parameters.backward").warned(
            "'{site}' had {number} gradients in one {period}. Each was transformed by itself, "
            "which differs unless the transform is linear. Use stage='step' for their sum."
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._most: dict[Operation, tuple[int, SiteHook]] = {}  # the last call in this step

    def further_gradient(self, attachment: AttachmentLike, hook: SiteHook, call: int) -> None:
        if call > self._most.get(hook.operation, (0, hook))[0]:
            self._most[hook.operation] = call, hook

    def step_ended(self, attachment: AttachmentLike) -> None:
        for operation, (call, hook) in self._most.items():
            if operation.intervention.differs_from_sum and not operation.has_several_tasks:
                warn_of_parts(attachment, hook, call + 1, "optimizer step")
        self._most.clear()


def warn_of_parts(attachment: AttachmentLike, hook: SiteHook, number: int, period: str) -> None:
    """Warn once that acting on each of several gradients differs from acting on their sum."""
    label = hook.operation.label
    text = PartsOfASum.text(
        "accumulation, not linear", site=hook.entry.site, number=number, period=period
    )
    attachment.warn_once(f"{label}: {text}", key=f"{label} acts on parts")
