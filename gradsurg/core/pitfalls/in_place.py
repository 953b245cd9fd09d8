"""A tensor is written to after it was hooked."""

from typing import ClassVar

from gradsurg.core.pitfalls.base import Pitfall, refused


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

    rows: ClassVar = {
        ("in-place write", "Outputs"): refused(
            "the module {fault}: the gradient of its output cannot be told from that of its input. "
            "Use Outputs of the module before."
        ),
        ("in-place write", "Inputs"): refused(
            "the module {fault}: a hook would see none or a part of the gradient. Use Outputs of "
            "the module before, or path='total', which allows writes to a tensor that is no view."
        ),
        ("in-place consumer", "Inputs.branch"): refused(
            "the module wrote to its input in place, and the gradient of this branch cannot be "
            "told from that of the tensor itself. "
            "Use path='total', or Outputs of the module before."
        ),
    }
