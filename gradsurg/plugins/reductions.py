"""Norms and means over the axes of a gradient that a `per` pattern selects."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce as reduce_types
from typing import Annotated

import torch
from einops import EinopsError, reduce
from pydantic import AfterValidator, Field
from torch import Tensor, distributed

from gradsurg.torch_internals import autograd

WORDS = ("tensor", "unit", "entry")
SMALL = 1 << 20  # entries of gradients that may be copied together

_shards: "list[distributed.ProcessGroup]" = []  # a plain list, which torch.compile can read


@contextmanager
def of_shards(group: "distributed.ProcessGroup") -> Iterator[None]:
    """Treat gradients in the block as parts of tensors that are sharded over a group of processes.

    `norms_of`, `joint_norm` and `norm(..., "tensor")` then return norms of the whole tensors; all
    processes must call them. Other reductions are over the parts.
    """
    _shards.append(group)
    try:
        yield
    finally:
        _shards.pop()


def _over_shards(norms: Tensor, p: float = 2.0) -> Tensor:
    """The p-norms of whole tensors, computed from the norms of their parts.

    This takes one all-reduce for p <= 2 and for infinity, and two for other p.

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

    No power overflows or underflows: where the norm of the unchanged entries is out of range they
    are divided by the largest first.
    """
    axes = reduced_axes(per, grad.ndim)
    if per == "tensor" and _shards:
        size = grad.new_zeros((), dtype=torch.float64)  # for an empty shard
        if grad.numel():
            size = torch.linalg.vector_norm(widened(grad), p, dtype=torch.float64)
        return _over_shards(size, p).to(_wide(grad.dtype)).reshape((1,) * grad.ndim)
    if not axes or grad.numel() == 0:
        return widened(grad).abs()
    if p == torch.inf:
        return peak(widened(grad), axes)
    size = torch.linalg.vector_norm(grad, p, axes, keepdim=True, dtype=_wide(grad.dtype))
    limits = torch.finfo(size.dtype)
    # If the norm is above `least`, powers that underflow are no more than a rounding error.
    least = (grad.numel() * limits.tiny / limits.eps) ** (1 / p)
    if _is_on_host(size):  # no device is waited for, and one pass over the entries is enough
        low, high = torch.aminmax(size)
        if low.item() > least and high.item() < torch.inf:
            return size
    wide = widened(grad)
    with torch.no_grad():  # `detach` has no rule for `is_grads_batched`
        largest = peak(wide, axes)
        is_exact = (size > least) & (size < torch.inf) | (largest == 0) | ~largest.isfinite()
        unit = torch.where(is_exact, 1.0, largest)
    return unit * torch.linalg.vector_norm(wide / unit, p, axes, keepdim=True)


def _is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor has values that Python can read without waiting for a device."""
    return (
        not torch.compiler.is_compiling()
        and tensor.is_cpu
        and type(tensor) is Tensor
        and not autograd.is_wrapped(tensor)
    )


def peak(grad: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """The largest magnitude over the axes (by default all), which are kept; NaN if one is NaN."""
    ends = grad.amax(axes, keepdim=True), grad.amin(axes, keepdim=True)
    return torch.maximum(*(end.abs() for end in ends))  # half the time of `grad.abs().amax()`


def direction(grad: Tensor, per: str, p: float = 2.0, eps: float = 0.0) -> Tensor:
    """`grad` / (its norm + eps), zero where the norm is zero; float32 or wider."""
    size = norm(grad, per, p)
    return widened(grad) / torch.where(size == 0, 1.0, size + eps)


def sums(grad: Tensor, per: str) -> Tensor:
    """The sum over the reduced axes, broadcastable against `grad`; float32 or wider."""
    axes = reduced_axes(per, grad.ndim)
    return widened(grad).sum(dim=axes, keepdim=True) if axes else widened(grad)


def norms_of(grads: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of each gradient, in their widest dtype and on the first one's device.

    Infinite if the sum of the powers overflows. With p = inf no gradient may be empty.
    """
    if not grads:
        return torch.zeros(0)
    dtype = reduce_types(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    if autograd.in_functorch():  # `torch.vmap` has no rule for the `_foreach` functions
        norms = [torch.linalg.vector_norm(grad, p, dtype=dtype) for grad in grads]
    else:
        norms = autograd.foreach_norm(list(grads), p, dtype)
    return _over_shards(torch.stack([size.to(grads[0].device) for size in norms]), p)


def joint_norm(grads: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of all entries of all gradients; see `norms_of`."""
    return torch.linalg.vector_norm(norms_of(grads, p), p)


def scaled(grads: Sequence[Tensor], factors: Tensor) -> Iterator[Tensor]:
    """Yield each gradient times its factor, or times the only factor, in the gradient's dtype.

    The results are computed one at a time, unless all gradients are small.
    """
    is_small = factors.numel() == 1 and 0 < sum(grad.numel() for grad in grads) <= SMALL
    alike = len({(grad.dtype, grad.device) for grad in (factors, *grads)}) == 1
    # PyTorch cannot differentiate `_foreach_mul` of several tensors by the factor.
    if is_small and alike and not (factors.requires_grad or autograd.in_functorch()):
        yield from autograd.foreach_mul(list(grads), factors.reshape(()))
        return
    for grad, factor in zip(grads, factors.expand(len(grads)).unbind(), strict=True):
        # If dtypes and devices are alike, the conversions of `multiplied` would change nothing.
        yield grad * factor if alike else multiplied(grad, factor.to(grad.device))


def multiplied(grad: Tensor, factor: Tensor | float) -> Tensor:
    """Return a gradient times a factor, computed in float32 or wider, in its own dtype."""
    return (widened(grad) * factor).to(grad.dtype)


def mean(grad: Tensor, per: str) -> Tensor:
    """The mean over the reduced axes, broadcastable against `grad`; float32 or wider."""
    axes = reduced_axes(per, grad.ndim)
    wide = widened(grad)
    return wide.mean(dim=axes, keepdim=True) if axes and grad.numel() else wide


def widened(grad: Tensor) -> Tensor:
    """`grad` in float32 if it has half precision, in which sums of many entries are inexact."""
    return grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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
