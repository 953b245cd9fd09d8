"""Sums over pairs of gradients, before and after a transform, from which effects are computed.

Measuring many small gradients costs by the call, so pairs of one device and dtype are measured
together, and small samples are copied and measured together with those of later steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsurg.torch_internals import autograd

Array = NDArray[np.float64]

NUM_SUMS = 8
NUM_ROWS = NUM_SUMS + 2  # the maps to be summed, and two rows of scratch
SMALL = 1 << 14  # largest sample, in entries, that is copied to be measured with others
COPIED = 1 << 16  # entries of such copies at a time
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude


@dataclass(slots=True)
class Sample:
    """Pairs of gradients with one device and dtype; either all are unchanged, or none is.

    At most `limit` entries are measured at a time: the buffers take about ten times as many.
    """

    device: torch.device
    dtype: torch.dtype
    is_unchanged: bool
    limit: int
    slots: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    befores: list[Tensor] = field(default_factory=list)
    afters: list[Tensor] = field(default_factory=list)
    total: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """Columns of sums: one for each slot at each of the `times` it was sampled."""

    slots: list[int]
    sizes: list[int]
    sums: Tensor
    times: int = 1

    @property
    def all_sizes(self) -> list[int]:
        """The size of the gradient of each column."""
        return self.sizes * self.times


@dataclass(slots=True)
class _Copies:
    """Flat copies of samples with the same slots and sizes."""

    sample: Sample
    befores: list[Tensor] = field(default_factory=list)
    afters: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Samples:
    """Samples waiting to be measured, and the `sums` of those that were."""

    sums: list[Sums] = field(default_factory=list)
    _copies: dict[tuple[object, ...], _Copies] = field(default_factory=dict)
    _copied: int = 0
    # The newest gradient of a slot: a flat tensor, its start and its size there; or its sketch.
    _newest: dict[int, tuple[Tensor, int, int]] = field(default_factory=dict)
    _sketches: dict[int, Tensor] = field(default_factory=dict)
    _sketched: set[int] = field(default_factory=set)
    _buffers: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Renew the sketch of each slot at its next gradient."""
        self._sketched.clear()

    def take(self, sample: Sample) -> None:
        """Copy a small sample, to be measured with others; measure a large one."""
        if sample.total > SMALL:
            self._sketch(sample)
            self._measure(sample)
            return
        if self._copied + sample.total > COPIED:
            self.measure()
        key = sample.device, sample.dtype, sample.is_unchanged, *sample.slots, *sample.sizes
        copies = self._copies.setdefault(key, _Copies(sample))
        copies.befores.append(_copy(sample.befores))
        if not sample.is_unchanged:
            copies.afters.append(_copy(sample.afters))
        sample.befores, sample.afters = [], []
        self._copied += sample.total

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the sums of the copied samples."""
        pending, self._copies, self._copied = self._copies, {}, 0
        for copies in pending.values():
            slots, sizes, times = copies.sample.slots, copies.sample.sizes, len(copies.befores)
            sums = self._compute(copies.befores, copies.afters or None, sizes)
            self.sums.append(Sums(slots, sizes, sums, times))
            starts = [0, *accumulate(sizes)]
            for slot, start, size in zip(slots, starts, sizes, strict=False):
                self._newest[slot] = copies.befores[-1], start, size
                self._sketches.pop(slot, None)

    def sketches(self) -> Iterator[tuple[int, Tensor]]:
        """For each slot once: entries of its newest gradient, and how many each represents.

        So a large gradient weighs more in the quantiles.
        """
        newest, self._newest = self._newest, {}
        sketches, self._sketches = self._sketches, {}
        yield from sketches.items()
        for slot, (flat, start, size) in newest.items():
            yield slot, _thinned(flat[start : start + size])

    def close(self) -> None:
        """Release all memory but sums and sketches."""
        self.measure()
        self._buffers = {}

    def _sketch(self, sample: Sample) -> None:
        for slot, grad in zip(sample.slots, sample.befores, strict=True):
            if slot not in self._sketched:
                self._sketched.add(slot)
                self._newest.pop(slot, None)
                self._sketches[slot] = _thinned(grad.reshape(-1))

    def _measure(self, sample: Sample) -> None:
        """Compute the sums of a sample, of a large gradient in chunks."""
        befores, afters, sizes = sample.befores, sample.afters, sample.sizes
        limit = sample.limit
        if sample.total > limit:
            flat = befores[0].reshape(-1), afters[0].reshape(-1)
            parts = zip(flat[0].split(limit), flat[1].split(limit), strict=True)
            sums = torch.stack(
                [
                    self._compute([b], None if sample.is_unchanged else [a], [b.numel()])
                    for b, a in parts
                ]
            ).sum(0)
        else:
            after = None if sample.is_unchanged else [autograd.flatten(afters)]
            sums = self._compute([autograd.flatten(befores)], after, sizes)
        self.sums.append(Sums(sample.slots, sizes, sums))

    def _compute(
        self, befores: list[Tensor], afters: list[Tensor] | None, sizes: list[int]
    ) -> Tensor:
        """One column of sums for each pair, computed in a buffer that is kept.

        Each tensor holds gradients of these sizes one after the other; the first columns are those
        of the first tensor. Without `afters` the gradients are unchanged.
        """
        total, times = sum(sizes), len(befores)
        first = befores[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        key = first.device, wide
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < total * times:
            buffer = first.new_empty(NUM_ROWS, total * times, dtype=wide)
            self._buffers[key] = buffer
        buffer = buffer[:, : total * times]
        if afters is None:
            _fill_unchanged(buffer, _joined(befores).to(wide))
            return _all_sums(_sums(buffer[:2], sizes, times))
        _fill(buffer, _joined(befores).to(wide), _joined(afters).to(wide))
        return _sums(buffer[:NUM_SUMS], sizes, times)


def numbers(sums: Tensor, sizes: list[int]) -> Array:
    """Convert columns of sums to rows of EFFECT_NUMBERS on the host, each with a count of 1."""
    # For so few numbers a call of numpy takes a fifth of the time of a call of PyTorch.
    host = sums.cpu().double().numpy()
    counts = np.maximum(sizes, 1)
    with np.errstate(all="ignore"):
        before, after, distance = np.sqrt(host[:3])
        product = before * after
        # Both norms zero: cosine 1. One of them zero: cosine 0.
        cosine = np.where(product > 0, (host[3] / product).clip(-1, 1), before == after)
        cosine = np.where(np.isnan(product), product, cosine)
        relative = np.where(before > 0, distance / before, after > 0)
        relative = np.where(np.isnan(product), product, relative)
        changed, flipped, zeroed = host[4:7] / counts
    columns = [before, after, cosine, changed, flipped, zeroed, relative, host[7]]
    return np.stack([*columns, np.ones_like(before)], axis=1)


def _fill(buffer: Tensor, before: Tensor, after: Tensor) -> None:
    """Fill the first NUM_SUMS rows with the maps to be summed; the others are scratch.

    Comparisons are written into float rows, which is four times as fast as into booleans.
    """
    squares, squares_after, squared, products, changed, flipped, zeroed, nonfinite = buffer[
        :NUM_SUMS
    ]
    difference, spare = buffer[NUM_SUMS:]
    torch.mul(before, before, out=squares)
    torch.mul(after, after, out=squares_after)
    torch.sub(after, before, out=difference)
    torch.mul(difference, difference, out=squared)
    torch.mul(before, after, out=products)
    torch.ne(after, before, out=changed)
    # A third of the work is for non-finite entries. On a CPU `.item()` shows without waiting
    # whether there are any.
    if difference.device.type == "cpu" and isfinite(difference.sum().item()):
        nonfinite.zero_()
    else:
        _correct(changed, nonfinite, before, after, difference, spare)
    torch.sign(
        before, out=spare
    )  # the product of small numbers underflows, that with a sign does not
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
    """Fill `nonfinite`, and remove from `changed` the entries that are NaN before and after."""
    # Only NaN differs from itself.
    torch.ne(before, before, out=nonfinite)
    changed.sub_(torch.ne(after, after, out=spare).mul_(nonfinite))
    # x - x is 0 for every number, NaN for NaN and the infinities.
    torch.sub(difference, difference, out=spare)
    torch.ne(spare, 0, out=nonfinite)


def _fill_unchanged(buffer: Tensor, grad: Tensor) -> None:
    """Fill two rows, squares and non-finite flags: enough for an unchanged gradient."""
    squares, nonfinite = buffer[:2]
    torch.mul(grad, grad, out=squares)
    torch.sub(grad, grad, out=nonfinite)
    torch.ne(nonfinite, 0, out=nonfinite)


def _all_sums(sums: Tensor) -> Tensor:
    """The NUM_SUMS sums of unchanged gradients, from the two of `_fill_unchanged`."""
    squares, nonfinite = sums
    zero = torch.zeros_like(squares)
    distance = zero.masked_fill(nonfinite > 0, torch.nan)  # as infinity minus itself
    return torch.stack([squares, squares, distance, squares, zero, zero, zero, nonfinite])


def _sums(maps: Tensor, sizes: list[int], times: int) -> Tensor:
    """The sums of each piece of the maps; neighbours of one size in one call."""
    wide, sums, start = maps.view(len(maps), times, sum(sizes)), [], 0
    for size, group in groupby(sizes):
        count = len(list(group))
        end = start + count * size
        sums.append(wide[:, :, start:end].unflatten(2, (count, size)).sum(3))
        start = end
    return torch.cat(sums, dim=2).flatten(1)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _copy(grads: list[Tensor]) -> Tensor:
    """A flat copy of the entries of gradients."""
    flat = autograd.flatten(grads)
    return flat.clone() if len(grads) == 1 else flat  # of a single gradient it is an alias


def _thinned(flat: Tensor) -> Tensor:
    """About SKETCH magnitudes of a flat gradient; a second row has the entries each represents."""
    stride = max(1, flat.numel() // SKETCH)
    sample = flat.detach()[::stride].abs().float()
    return torch.stack([sample, torch.full_like(sample, stride)])
