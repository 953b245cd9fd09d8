"""Norms and means over the axes of a gradient that a `per` pattern selects."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce as reduce_types
from typing import Annotated

import torch
from einops import EinopsError, reduce
from pydantic import AfterValidator, Field
from torch import Tensor, distributed

WORDS = ("tensor", "unit", "entry")

_shards: "list[distributed.ProcessGroup]" = []  # a plain list, which torch.compile can read


@contextmanager
def of_shards(group: "distributed.ProcessGroup") -> Iterator[None]:
    """In the block gradients are the parts of tensors that are sharded over a group of processes.

    `norms_of`, `joint_norm` and `norm(..., "tensor")` then are those of the whole tensors; all
    processes must call them. Other reductions are those of the parts.
    """
    _shards.append(group)
    try:
        yield
    finally:
        _shards.pop()


def over_shards(norms: Tensor, p: float = 2.0) -> Tensor:
    """The p-norms of whole tensors from those of their parts: one all-reduce for p <= 2 and for
    infinity, else two.

    Outside `of_shards` these are the whole tensors.
    """
    if not _shards:
        return norms
    group = _shards[-1]
    if p <= 2:  # no square of a float32 number overflows or vanishes in float64
        powers = norms.double().pow(p)
        distributed.all_reduce(powers, distributed.ReduceOp.SUM, group)
        return powers.pow(1 / p).to(norms.dtype)
    peaks = norms.clone()
    distributed.all_reduce(peaks, distributed.ReduceOp.MAX, group)
    if p == torch.inf:
        return peaks
    unit = torch.where((peaks > 0) & peaks.isfinite(), peaks, 1.0)
    powers = (norms / unit).pow(p)  # no power overflows
    distributed.all_reduce(powers, distributed.ReduceOp.SUM, group)
    return unit * powers.pow(1 / p)


def _check(per: str) -> str:
    if per in WORDS:
        return per
    if per.count("->") != 1 or "(" in per:
        raise ValueError(
            "must be tensor, unit, entry or an einops reduce pattern without brackets, "
            "as 'o i kh kw -> o'"
        )
    left = per.split("->")[0].split()
    try:
        reduce(torch.zeros((1,) * (len(left) - left.count("..."))), per, "sum")
    except EinopsError as error:
        raise ValueError(
            f"must be an einops reduce pattern ({str(error).splitlines()[-1].strip()})"
        ) from None
    return per


Per = Annotated[str, AfterValidator(_check)]
"""`tensor`: one number for the whole tensor. `unit`: one for each index of axis 0 (an output unit
of a linear or convolution weight), the whole tensor if it has fewer than two axes. `entry`: no
reduction. Or an einops reduce pattern: `o i kh kw -> o` keeps the axis `o` apart."""


NormOrder = Annotated[float, Field(ge=1, allow_inf_nan=True)]
"""The p of a p-norm: 1 or more, `inf` for the largest magnitude."""


def reduced_axes(per: str, ndim: int) -> tuple[int, ...]:
    """The axes to reduce in a tensor with `ndim` axes. Raises ValueError if `per` does not fit."""
    match per:
        case "tensor":
            return tuple(range(ndim))
        case "unit":
            return tuple(range(1 if ndim > 1 else 0, ndim))
        case "entry":
            return ()
        case _:
            return _pattern_axes(per, ndim)


def norm(grad: Tensor, per: str, p: float = 2.0) -> Tensor:
    """The p-norm over the reduced axes, broadcastable against `grad`; float32 or wider.

    Entries are divided by the largest first, so that no power overflows or underflows.
    """
    axes = reduced_axes(per, grad.ndim)
    wide = widened(grad)
    if per == "tensor" and _shards:
        size = wide.new_zeros((), dtype=torch.float64)  # of a part without entries
        if wide.numel():
            size = torch.linalg.vector_norm(wide, p, dtype=torch.float64)
        return over_shards(size, p).to(wide.dtype).reshape((1,) * grad.ndim)
    if not axes or grad.numel() == 0:
        return wide.abs()
    with torch.no_grad():  # `detach` has no rule for `is_grads_batched`
        peak = wide.abs().amax(dim=axes, keepdim=True)
    unit = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    return unit * torch.linalg.vector_norm(wide / unit, p, dim=axes, keepdim=True)


def direction(grad: Tensor, per: str, p: float = 2.0, eps: float = 0.0) -> Tensor:
    """`grad` / (its norm + eps), zero where the norm is zero; float32 or wider."""
    size = norm(grad, per, p)
    return widened(grad) / torch.where(size == 0, 1.0, size + eps)


def sums(grad: Tensor, per: str) -> Tensor:
    """The sum over the reduced axes, broadcastable against `grad`; float32 or wider."""
    axes = reduced_axes(per, grad.ndim)
    return widened(grad).sum(dim=axes, keepdim=True) if axes else widened(grad)


def norms_of(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each gradient, in their widest dtype and on the first one's device.

    Infinite if the sum of the squares overflows.
    """
    dtype = reduce_types(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms = [torch.linalg.vector_norm(grad, dtype=dtype) for grad in grads]
    if not norms:
        return torch.zeros(0)
    return over_shards(torch.stack([size.to(norms[0].device) for size in norms]))


def joint_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all entries of all gradients, as `norms_of`."""
    return torch.linalg.vector_norm(norms_of(grads))


def mean(grad: Tensor, per: str) -> Tensor:
    """The mean over the reduced axes, broadcastable against `grad`; float32 or wider."""
    axes = reduced_axes(per, grad.ndim)
    wide = widened(grad)
    return wide.mean(dim=axes, keepdim=True) if axes and grad.numel() else wide


def widened(grad: Tensor) -> Tensor:
    """`grad` in float32 if it has half precision, in which sums of many entries are inexact."""
    return grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad


def _pattern_axes(per: str, ndim: int) -> tuple[int, ...]:
    left, right = (side.split() for side in per.split("->"))
    if "..." in left:
        spread = left.index("...")
        extra = ndim - len(left) + 1
        names = [*left[:spread], *(["..."] * extra), *left[spread + 1 :]]
    else:
        extra, names = 0, left
    if extra < 0 or len(names) != ndim:
        raise ValueError(f"per: the pattern '{per}' does not fit a tensor of {ndim} axes")
    return tuple(axis for axis, name in enumerate(names) if name not in right)
