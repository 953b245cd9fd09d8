"""Hooks add up."""

from collections.abc import Iterator
from weakref import WeakSet

from torch import nn

from gradsurg.core.pitfalls.base import AttachmentLike, Cell, Pitfall, SiteHook

_open: "WeakSet[AttachmentLike]" = WeakSet()


class TwoSurgeries(Pitfall):
    """A function that is registered as a hook two times is called two times.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> handles = [weight.register_hook(lambda grad: grad / 2) for _ in range(2)]
    >>> weight.backward(); weight.grad
    tensor([0.2500])

    https://docs.pytorch.org/docs/stable/notes/autograd.html, "Backward Hooks execution".
    """

    cells = (
        Cell("two surgeries", "*").warned(
            "two surgeries with this intervention are attached, and both changed the gradient at "
            "'{site}'. Leave the block of one of them, or call its live.close()"
        ),
    )

    def attached(self, attachment: AttachmentLike) -> None:
        self.done.add("attached")
        if not attachment.shadow:
            _open.add(attachment)
            self.stack.callback(_open.discard, attachment)

    def first_gradient(self, attachment: AttachmentLike, hook: SiteHook) -> Iterator[str]:
        for other in [*_open] if attachment in _open else []:
            if other is not attachment and self._has_acted(other, attachment.model, hook):
                _open.difference_update((attachment, other))  # one of them warns, and once
                text = self.text("two surgeries", site=hook.entry.site)
                yield f"{hook.operation.label}: {text}"
                return

    def _has_acted(self, other: AttachmentLike, model: nn.Module, hook: SiteHook) -> bool:
        """Whether another surgery has the intervention of a hook, and acted at its site."""
        return other.model is model and any(
            operation.intervention == hook.operation.intervention
            and operation.answer is not False
            and (twin := operation.hooks.get(hook.entry.site)) is not None
            and bool(twin.entry.fired or twin.entry.on_device)
            for operation in other.operations
        )
