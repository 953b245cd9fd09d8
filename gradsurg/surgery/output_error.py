"""The gradient of what a model has returned, known for the rest of the backward it came in."""

from contextlib import ExitStack
from weakref import ref

from torch import Tensor, nn

from gradsurg.torch_internals import autograd, compiling
from gradsurg.triggers.base import Clock


def follow_error(model: nn.Module, clock: Clock, stack: ExitStack) -> None:
    """Have `clock.error` be the gradient of what `model` has returned, until its backward ends
    or, where that raised, the next forward of the model.

    Raises TypeError in a forward that returns anything but one tensor.
    """
    own, on = ref(model), True

    def arrives(grad: Tensor) -> None:
        if on:
            clock.error = grad.detach()
            autograd.at_end_of_backward(forget)

    def forget() -> None:
        clock.error = None

    def retire() -> None:
        """Hooks on graphs that are already built outlive their handles."""
        nonlocal on
        on = False

    @compiling.untraced
    def hook(called: nn.Module, args: tuple[object, ...], output: object) -> None:
        if called is not own() or autograd.in_backward():
            return
        forget()  # a backward that raised has not
        if not isinstance(output, Tensor):
            raise TypeError(
                "a transform needs the gradient of what the model has returned, which must be one "
                f"tensor, found {type(output).__name__}"
            )
        if output.requires_grad:
            output.register_hook(arrives)

    stack.callback(retire)
    stack.callback(model.register_forward_hook(hook).remove)
