"""The sums over pairs of gradients that effects are made of."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from gradsurg import engine

NUM_SUMS = 8
NUM_ROWS = NUM_SUMS + 2  # the maps that are summed, and two to work in


class Rooms:
    """The memory that is worked in, kept for each device and dtype."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def sums(self, befores: list[Tensor], afters: list[Tensor], sizes: list[int]) -> Tensor:
        """A column of sums for each pair, worked out in memory that is kept for it."""
        total = sum(sizes)
        first = befores[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        key = first.device, wide
        room = self._kept.get(key)
        if room is None or room.shape[1] < total:
            room = self._kept[key] = first.new_empty(NUM_ROWS, total, dtype=wide)
        room = room[:, :total]
        _fill(room, engine.flat(befores).to(wide), engine.flat(afters).to(wide))
        return torch.cat(list(_summed(room[:NUM_SUMS], sizes)), dim=1)


def numbers(sums: Tensor, sizes: list[int]) -> Tensor:
    """From columns of sums to rows of NUMBERS and a one that counts the gradient."""
    counts = sums.new_tensor(sizes).clamp(min=1)
    before, after, distance = sums[:3].sqrt()
    product = before * after
    # Both zero: nothing has turned. One of them zero: nothing is left of the direction.
    cosine = torch.where(product > 0, (sums[3] / product).clamp(-1, 1), (before == after).double())
    cosine = torch.where(product.isnan(), product, cosine)
    relative = torch.where(before > 0, distance / before, (after > 0).double())
    relative = torch.where(product.isnan(), product, relative)
    changed, flipped, zeroed = sums[4:7] / counts
    columns = [before, after, cosine, changed, flipped, zeroed, relative, sums[7]]
    return torch.stack([*columns, torch.ones_like(before)], dim=1)


def _summed(maps: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """The sums of each piece of the maps; those of one size, side by side, in one call."""
    start = 0
    for size, alike in groupby(sizes):
        count = len(list(alike))
        end = start + count * size
        yield maps[:, start:end].unflatten(1, (count, size)).sum(2)
        start = end


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
    # NaN differs from itself; a NaN that stays is no change.
    torch.ne(before, before, out=changed)
    torch.ne(after, after, out=spare).mul_(changed)
    torch.ne(after, before, out=changed).sub_(spare)
    torch.sign(before, out=spare)  # products of small numbers vanish, with a sign they do not
    torch.lt(spare.mul_(after), 0, out=flipped)
    torch.eq(after, 0, out=zeroed)
    torch.ne(before, 0, out=spare)
    zeroed.mul_(spare)
    # x - x is 0 for every number, NaN for NaN and the infinities.
    torch.sub(difference, difference, out=spare)
    torch.ne(spare, 0, out=nonfinite)
