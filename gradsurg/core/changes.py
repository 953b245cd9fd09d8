"""Changes of an attached surgery, applied outside of backward passes only."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import ref

from torch import nn

from gradsurg.torch_internals import autograd, compiling


class PendingChanges:
    """Changes that wait for the end of a backward pass. The model is held by a weak reference."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self.pending: list[Callable[[], None]] = []
        self._is_held = False
        self._forward_hook = ExitStack()

    def request(self, change: Callable[[], None]) -> None:
        """Apply a change now, or when the running backward has ended."""
        self.apply()
        if not autograd.in_backward() and not self._is_held:
            change()
            return
        model = self._model()
        if not self.pending and model is not None:
            # A backward that fails calls nothing at its end: apply before the next forward then.
            hook = model.register_forward_pre_hook(compiling.untraced(lambda *_: self.apply()))
            self._forward_hook.callback(hook.remove)
        self.pending.append(change)
        if autograd.in_backward():
            autograd.at_end_of_backward(self._end_backward)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Treat the backward passes in the block as one: apply changes at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.apply()

    def apply(self, has_ended: bool = False) -> None:
        """Apply pending changes if no backward runs, or the running one `has_ended`."""
        if not self.pending or self._is_held or (autograd.in_backward() and not has_ended):
            return
        self._forward_hook.close()
        while self.pending:
            self.pending.pop(0)()

    def close(self) -> None:
        """Drop pending changes."""
        self._forward_hook.close()
        self.pending = []

    def _end_backward(self) -> None:
        if not autograd.in_inner_backward():
            self.apply(has_ended=True)
