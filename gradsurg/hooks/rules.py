"""The rules that a transform must keep, whoever has written it, and who is trusted to."""

from typing import TypeGuard

import torch
from torch import Tensor

from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import FunctionTransform, Transform


def known(transform: Transform) -> bool:
    """Whether it is one of gradsurg's own, with all that it is made of: these keep the rules at
    every gradient. Those of others are looked at each time.
    """
    if (
        isinstance(transform, FunctionTransform)
        or type(transform).__module__.split(".")[0] != "gradsurg"
    ):
        return False
    fields = [own if isinstance(own, tuple) else (own,) for own in vars(transform).values()]
    return all(known(part) for own in fields for part in own if isinstance(part, Transform))


def alike(result: object, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether a result is a tensor like the gradient; of those of others the rest is looked at."""
    return isinstance(result, Tensor) and result.shape == grad.shape and result.dtype is grad.dtype


def same(result: object, grad: Tensor) -> TypeGuard[Tensor]:
    """As `alike`, and on the same device and with the same layout."""
    return alike(result, grad) and result.device == grad.device and result.layout is grad.layout


def takes(grad: Tensor) -> bool:
    """Whether transforms take such gradients: dense real ones."""
    return grad.layout is torch.strided and not grad.is_complex()


def kind_of(value: object) -> str:
    """What a value is, for an error."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def version_of(tensor: Tensor) -> int:
    """How often it was written to; what inference mode has made does not count."""
    return 0 if tensor.is_inference() else tensor._version


def shares(result: Tensor, value: Tensor) -> bool:
    """Whether two tensors are of one storage."""
    if autograd.is_wrapped(result) or autograd.is_wrapped(value):
        return False
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0
