"""A tensor is written to after it was hooked."""

from gradsurg.core.pitfalls.base import Cell, Pitfall


class WrittenTensor(Pitfall):
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

    cells = (
        Cell("in-place write", "Outputs").refused(
            "the module {fault}, so its output has the gradient of its input. "
            "Use Outputs of the module before."
        ),
        Cell("in-place write", "Inputs").refused(
            "the module {fault}, so a hook would miss some or all of the gradient. "
            "Use Outputs of the module before, or path='total' if it is no view."
        ),
        Cell("in-place consumer", "Inputs.branch").refused(
            "the module wrote to its input in place, so that path='branch' has no gradient. "
            "Use path='total', or Outputs of the module before."
        ),
    )
