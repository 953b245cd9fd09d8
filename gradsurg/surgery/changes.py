"""When what is changed in a live surgery takes effect: never inside a backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import ref

from torch import nn

from gradsurg.torch_internals import autograd, compiling


class Changes:
    """What waits for the backward at hand to end. It does not hold the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._waiting: list[Callable[[], None]] = []
        self._held = False  # several backwards are one
        self._alarm = ExitStack()  # the hook that ends the waiting where the backward has failed

    def soon(self, change: Callable[[], None]) -> None:
        """Make a change now, or when the backward at hand has ended."""
        self.settle()
        if not autograd.in_backward() and not self._held:
            change()
            return
        model = self._model()
        if not self._waiting and model is not None:
            # At the latest before the next forward: a backward that fails has no end to wait for.
            hook = model.register_forward_pre_hook(compiling.untraced(lambda *_: self.settle()))
            self._alarm.callback(hook.remove)
        self._waiting.append(change)
        if autograd.in_backward():
            autograd.at_end_of_backward(self._at_end)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is changed in the block waits for its end: the backwards in it are one."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.settle()

    def settle(self, ended: bool = False) -> None:
        """Make the changes that have waited for the end of a backward, if it has `ended`."""
        if not self._waiting or self._held or (autograd.in_backward() and not ended):
            return
        self._alarm.close()
        while self._waiting:
            self._waiting.pop(0)()

    def close(self) -> None:
        """The block has ended: what waits is dropped."""
        self._alarm.close()
        self._waiting = []

    def _at_end(self) -> None:
        if not autograd.in_inner_backward():
            self.settle(ended=True)
