"""The sums over pairs of gradients that effects are made of."""

from itertools import groupby
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

NUM_SUMS = 8
NUM_ROWS = NUM_SUMS + 2  # the maps that are summed, and two to work in


class ScratchBuffers:
    """The memory that is worked in, kept for each device and dtype."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def sums(self, befores: list[Tensor], afters: list[Tensor] | None, sizes: list[int]) -> Tensor:
        """A column of sums for each pair, worked out in memory that is kept for it.

        Each tensor holds gradients of these sizes one after the other: the first columns are those
        of the first one. Without `afters` the gradients were left as they are.
        """
        total, times = sum(sizes), len(befores)
        first = befores[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        key = first.device, wide
        room = self._kept.get(key)
        if room is None or room.shape[1] < total * times:
            room = self._kept[key] = first.new_empty(NUM_ROWS, total * times, dtype=wide)
        room = room[:, : total * times]
        if afters is None:
            return _of_same(_sums(_same(room, _one(befores).to(wide)), sizes, times))
        _fill(room, _one(befores).to(wide), _one(afters).to(wide))
        return _sums(room[:NUM_SUMS], sizes, times)


def numbers(sums: Tensor, sizes: list[int]) -> Array:
    """From columns of sums to rows of EFFECT_NUMBERS and a one that counts the gradient, on the host."""
    # A call on so few numbers takes numpy a fifth of what it takes PyTorch.
    host = sums.cpu().double().numpy()
    counts = np.maximum(sizes, 1)
    with np.errstate(all="ignore"):
        before, after, distance = np.sqrt(host[:3])
        product = before * after
        # Both zero: nothing has turned. One of them zero: nothing is left of the direction.
        cosine = np.where(product > 0, (host[3] / product).clip(-1, 1), before == after)
        cosine = np.where(np.isnan(product), product, cosine)
        relative = np.where(before > 0, distance / before, after > 0)
        relative = np.where(np.isnan(product), product, relative)
        changed, flipped, zeroed = host[4:7] / counts
    columns = [before, after, cosine, changed, flipped, zeroed, relative, host[7]]
    return np.stack([*columns, np.ones_like(before)], axis=1)


def _fill(room: Tensor, before: Tensor, after: Tensor) -> None:
    """Fill the maps whose sums are wanted, with the help of the rows behind them.

    Comparisons are written into float rows: those that make booleans take four times as long.
    """
    squares, squares_after, squared, products, changed, flipped, zeroed, nonfinite = room[:NUM_SUMS]
    difference, spare = room[NUM_SUMS:]
    torch.mul(before, before, out=squares)
    torch.mul(after, after, out=squares_after)
    torch.sub(after, before, out=difference)
    torch.mul(difference, difference, out=squared)
    torch.mul(before, after, out=products)
    torch.ne(after, before, out=changed)
    # A third of the work is for what is not finite, which a CPU can tell without waiting: `.item()`
    # is asked there alone.
    if difference.device.type == "cpu" and isfinite(difference.sum().item()):
        nonfinite.zero_()
    else:
        _correct(changed, nonfinite, before, after, difference, spare)
    torch.sign(before, out=spare)  # products of small numbers vanish, with a sign they do not
    torch.lt(spare.mul_(after), 0, out=flipped)
    torch.eq(after, 0, out=zeroed)
    torch.ne(before, 0, out=spare)
    zeroed.mul_(spare)


def _correct(
    changed: Tensor,
    nonfinite: Tensor,
    before: Tensor,
    after: Tensor,
    difference: Tensor,
    spare: Tensor,
) -> None:
    """Fill `nonfinite`, and take off `changed` each NaN that was one and stays one."""
    # NaN differs from itself.
    torch.ne(before, before, out=nonfinite)
    changed.sub_(torch.ne(after, after, out=spare).mul_(nonfinite))
    # x - x is 0 for every number, NaN for NaN and the infinities.
    torch.sub(difference, difference, out=spare)
    torch.ne(spare, 0, out=nonfinite)


def _same(room: Tensor, grad: Tensor) -> Tensor:
    """The two maps that tell all of gradients that were left as they are."""
    squares, nonfinite = room[:2]
    torch.mul(grad, grad, out=squares)
    torch.sub(grad, grad, out=nonfinite)
    torch.ne(nonfinite, 0, out=nonfinite)
    return room[:2]


def _of_same(sums: Tensor) -> Tensor:
    """All sums, from those of the two maps."""
    squares, nonfinite = sums
    zero = torch.zeros_like(squares)
    distance = zero.masked_fill(nonfinite > 0, torch.nan)  # as infinity less itself
    return torch.stack([squares, squares, distance, squares, zero, zero, zero, nonfinite])


def _sums(maps: Tensor, sizes: list[int], times: int) -> Tensor:
    """The sums of each piece of the maps; those of one size, side by side, in one call."""
    wide, found, start = maps.view(len(maps), times, sum(sizes)), [], 0
    for size, alike in groupby(sizes):
        count = len(list(alike))
        end = start + count * size
        found.append(wide[:, :, start:end].unflatten(2, (count, size)).sum(3))
        start = end
    return torch.cat(found, dim=2).flatten(1)


def _one(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
