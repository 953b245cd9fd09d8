"""A tensor is written to after it was hooked."""

from gradsurg.core.pitfalls.base import FULL_HOOKS, Pitfall


class WrittenOutput(Pitfall):
    """A hook of a tensor belongs to the operation that had made it when the hook was registered.

    After a write in place the same tensor is the result of another operation, and the hook still
    gets the gradient of the earlier one, or none if the write was to the base of a view.

    >>> x = 2 * torch.ones(1, requires_grad=True)
    >>> handle = x.register_hook(lambda grad: print(grad.item()))
    >>> x.mul_(10).backward()  # the gradient of x is 1 now
    10.0

    https://docs.pytorch.org/docs/stable/notes/autograd.html, "Behavior of Tensor hooks when Tensor
    is modified in-place".
    """

    context, kinds = "in-place write", "Outputs"
    why = "the module {fault}: the gradient of its output cannot be told from that of its input"
    instead = "Use Outputs of the module before"


class WrittenInput(WrittenOutput):
    """The write of a module to its input, which is hooked before the module runs."""

    kinds = "Inputs"
    why = "the module {fault}: a hook would see none or a part of the gradient"
    instead = (
        "Use Outputs of the module before, or path='total', which allows writes to a tensor that "
        "is no view"
    )


class WrittenBranch(WrittenOutput):
    """The same at an alias, which a module gets in the place of its input."""

    context, kinds = "in-place consumer", "Inputs.branch"
    why = (
        "the module wrote to its input in place, and the gradient of this branch cannot be told "
        "from that of the tensor itself"
    )
    instead = "Use path='total', or Outputs of the module before"


class WrittenView(Pitfall):
    """A full backward hook makes inputs and outputs of its module views, which PyTorch protects.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_full_backward_hook(lambda *_: None)
    >>> layer(torch.ones(1, 2, requires_grad=True)).relu_()
    Traceback (most recent call last):
    RuntimeError: Output 0 of BackwardHookFunctionBackward is a view and is being modified inplace.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html,
    `register_full_backward_hook`.
    """

    context, kinds = "in-place consumer", FULL_HOOKS
    why = "PyTorch allows no in-place change of a tensor with a full backward hook"
    instead = "Use Outputs or Inputs, or inplace=False"
