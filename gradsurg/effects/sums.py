"""Nine sums over a gradient before and after a transform, from one pass over both.

The sums are before², after², (after - before)², before * after, and the numbers of entries that
changed, changed sign, became zero, are not finite, and were not zero before. NaN before and after
is no change.
"""

import logging
from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_ssize_t, c_void_p
from functools import cache
from importlib import import_module
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.plugins.extras import need

Array = NDArray[np.float64]
CPUKernel = Callable[[int, int, int, int], None]
"""Add the sums of `size` entries at the addresses `before` and `after` to the float64 at `sums`."""

NUM_SUMS = 9
ROW_BYTES = 8 * NUM_SUMS
BLOCK = 2048  # entries summed in their own dtype before the sum goes on in float64
CHUNK = 1 << 16  # entries converted, or summed without a kernel, at a time: as fit a CPU's cache
SLOW = (
    "effects on gradients are summed by operations of PyTorch: a step of a small model can take "
    "three times as long, with effects_every=10 a quarter longer"
)
"""Logged once if numba cannot be used."""

_log = logging.getLogger("gradsurg")


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor holds its entries, on a CPU or another device."""
    if type(tensor) is not Tensor or tensor.is_neg():  # a view whose entries are to be negated
        return False
    try:
        return tensor.data_ptr() != 0  # of an empty tensor, or of zeros that take no memory
    except RuntimeError:  # inside torch.func and vmap a tensor stands for others, and has none
        return False


def add_on_cpu(before: Tensor, after: Tensor, sums: Tensor, row: int) -> None:
    """Add the sums of a pair in the memory of the CPU to a row of `sums`."""
    address = sums.data_ptr() + row * ROW_BYTES
    kernel = cpu_kernels().get(before.dtype)
    if kernel and before.is_contiguous() and after.is_contiguous():
        kernel(before.data_ptr(), after.data_ptr(), before.numel(), address)
        return
    wide = torch.promote_types(before.dtype, torch.float32)
    kernel = cpu_kernels().get(wide)
    # In the order of memory, so that `reshape` need not copy a transposed gradient.
    in_memory = sorted(range(before.dim()), key=before.stride, reverse=True)
    flat = (tensor.detach().permute(in_memory).reshape(-1) for tensor in (before, after))
    for chunks in zip(*(tensor.split(CHUNK) for tensor in flat), strict=True):
        chunk, chunk_after = (part.to(wide).contiguous() for part in chunks)
        if kernel:
            kernel(chunk.data_ptr(), chunk_after.data_ptr(), len(chunk), address)
        else:
            sums[row] += _sums_without_kernel(chunk, chunk_after)


def _sums_without_kernel(before: Tensor, after: Tensor) -> Tensor:
    """Return the sums of a chunk by fewer and faster operations than `eager_sums`.

    Inner products of signs count exactly, and are vectorized, which comparisons are not.
    """
    difference = after - before
    signs, signs_after, signs_changed = before.sign(), after.sign(), difference.sign()
    products = signs * signs_after  # -1 where the sign changes, 0 where either entry is 0
    terms = (before.square(), after.square(), difference.square(), before * after)
    counts = (part.dot(part) for part in (signs, signs_changed, products))
    stacked = torch.stack([*(term.sum() for term in terms), *counts, products.sum()])
    xx, yy, dd, xy, nonzero, changed, in_both, agreeing = stacked.tolist()
    if not isfinite(xx + yy):
        return eager_sums(before, after)
    flipped, zeroed = (in_both - agreeing) / 2, nonzero - in_both
    sums = [xx, yy, dd, xy, changed, flipped, zeroed, 0, nonzero]
    return torch.tensor(sums, dtype=torch.float64)


def eager_sums(before: Tensor, after: Tensor) -> Tensor:
    """Return the sums of any pair, on its device, by one operation of PyTorch after the other."""
    wide = torch.promote_types(before.dtype, torch.float32)
    before, after = before.detach().to(wide), after.detach().to(wide)
    # The product of small numbers underflows, that of their signs does not.
    maps = [
        before.square(),
        after.square(),
        (after - before).square(),
        before * after,
        (before != after) & ~(before.isnan() & after.isnan()),
        before.sign() * after.sign() < 0,
        (before != 0) & (after == 0),
        ~(before.isfinite() & after.isfinite()),
        before != 0,
    ]
    return torch.stack([entries.sum().to(wide) for entries in maps])


def effect_numbers(sums: Array, sizes: ArrayLike) -> Array:
    """Convert rows of sums to EFFECT_NUMBERS and the number of gradients that have each, 0 or 1.

    The result has the shape (rows, 2, numbers). A gradient with norm 0 has no cosine, one of zeros
    alone no share of entries that became zero; these are 0 with a count of 0.
    """
    xx, yy, dd, xy, changed, flipped, zeroed, nonfinite, nonzero = sums.T
    sizes = np.maximum(sizes, 1)
    with np.errstate(all="ignore"):
        before, after = np.sqrt(xx), np.sqrt(yy)
        product = before * after
        cosine = np.where(product > 0, (xy / product).clip(-1, 1), 0.0)
        relative = np.where(before > 0, np.sqrt(dd) / before, after > 0)
        is_nan = np.isnan(product)
        if is_nan.any():
            cosine = np.where(is_nan & (before != 0), product, cosine)
            relative = np.where(is_nan, product, relative)
    result = np.ones((len(sums), 2, len(EFFECT_NAMES)))
    numbers, known = result.transpose(1, 2, 0)
    numbers[:3], numbers[6:] = (before, after, cosine), (relative, nonfinite)
    numbers[3:6] = changed / sizes, flipped / sizes, zeroed / np.maximum(nonzero, 1)
    known[2], known[5] = before != 0, nonzero > 0
    return result


@cache
def cpu_kernels() -> dict[torch.dtype, CPUKernel]:
    """Compile the sums with numba, or load them from its cache; empty if it cannot be used."""
    try:
        need("run", "numba")
        numba: Any = import_module("numba")  # Any: its types say less than its documentation
        carray, types = numba.carray, numba.types

        def pair(start, start_after, size, address):  # without types: numba infers them
            befores, afters = carray(start, size), carray(start_after, size)
            sums = carray(address, NUM_SUMS)
            zero, one = befores.dtype.type(0), befores.dtype.type(1)
            infinity = befores.dtype.type(np.inf)
            for first in range(0, size, BLOCK):
                # Slices, because LLVM vectorizes a loop that begins at 0.
                last = min(first + BLOCK, size)
                before, after = befores[first:last], afters[first:last]
                xx = yy = dd = xy = changed = flipped = zeroed = nonfinite = nonzero = zero
                for i in range(len(before)):
                    x, y = before[i], after[i]
                    xx += x * x
                    yy += y * y
                    dd += (y - x) * (y - x)
                    xy += x * y
                    changed += one if x != y else zero
                    flipped += one if (min(x, y) < zero) & (max(x, y) > zero) else zero
                    zeroed += one if (x != zero) & (y == zero) else zero
                    nonzero += one if x != zero else zero
                if not xx + yy < infinity:  # a large or non-finite entry, which is rare
                    for i in range(len(before)):
                        x, y = before[i], after[i]
                        changed -= one if (x != x) & (y != y) else zero
                        nonfinite += zero if (abs(x) < infinity) & (abs(y) < infinity) else one
                totals = (xx, yy, dd, xy, changed, flipped, zeroed, nonfinite, nonzero)
                for index, total in enumerate(totals):
                    sums[index] += total

        kernels: dict[torch.dtype, CPUKernel] = {}
        prototype = PYFUNCTYPE(None, c_void_p, c_void_p, c_ssize_t, c_void_p)
        for dtype, kind in ((torch.float32, types.float32), (torch.float64, types.float64)):
            entries, sums = types.CPointer(kind), types.CPointer(types.float64)
            signature = types.void(entries, entries, types.intp, sums)
            # Sums in any order vectorize; NaN and infinities keep their meaning.
            compiled = numba.cfunc(signature, cache=True, fastmath={"reassoc", "nsz", "contract"})(
                pair
            )
            kernels[dtype] = prototype(compiled.address)
            _compiled.append(compiled)
    except (ImportError, RuntimeError, OSError) as error:  # also without a folder for the cache
        _log.warning("%s; %s", SLOW, error)
        return {}
    return kernels


_compiled: list[object] = []
"""The owners of the compiled code that `cpu_kernels` returns addresses of."""
