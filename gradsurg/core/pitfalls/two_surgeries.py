"""Hooks add up."""

from weakref import WeakSet, ref

from gradsurg.core.pitfalls.base import AttachmentLike, Pitfall, SiteHook

_open: "WeakSet[TwoSurgeries]" = WeakSet()


class TwoSurgeries(Pitfall):
    """PyTorch calls a function that was registered twice twice.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> handles = [weight.register_hook(lambda grad: grad / 2) for _ in range(2)]
    >>> weight.backward(); weight.grad
    tensor([0.2500])

    https://docs.pytorch.org/docs/stable/notes/autograd.html, "Backward Hooks execution".
    """

    context, kinds, outcome = "two surgeries", "*", "warned"
    why = "two open surgeries have this intervention, and both changed the gradient at '{site}'"
    instead = "close() the one that is not meant"

    def __init__(self) -> None:
        super().__init__()
        self._attachment: ref[AttachmentLike] | None = None
        self._is_told = False
        _open.add(self)

    def attached(self, attachment: AttachmentLike) -> None:
        self._attachment = ref(attachment)

    def first_gradient(self, attachment: AttachmentLike, hook: SiteHook) -> None:
        site = hook.entry.site
        for other in [] if attachment.shadow or self._is_told else [*_open]:
            if other is not self and other._repeats(attachment, hook):
                self._is_told = other._is_told = True
                text = f"{hook.operation.label}: {self.sentences(site=site)}"
                attachment.warn_once(text, key=self.context)
                return

    def closed(self, attachment: AttachmentLike) -> None:
        _open.discard(self)

    def _repeats(self, attachment: AttachmentLike, hook: SiteHook) -> bool:
        """Whether an intervention of this surgery has acted as that of another one at a site."""
        own = None if self._attachment is None else self._attachment()
        if own is None or own.shadow or not own.operations:
            return False
        return own.model is attachment.model and any(
            operation.intervention == hook.operation.intervention
            and operation.answer is not False
            and (twin := operation.hooks.get(hook.entry.site)) is not None
            and bool(twin.entry.fired or twin.entry.on_device)
            for operation in own.operations
        )
