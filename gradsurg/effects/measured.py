"""The numbers of all slots over some steps, in arrays with a row for each slot."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.sums import Array

NONFINITE = EFFECT_NAMES.index("nonfinite")


class Values(NamedTuple):
    """The numbers of a slot: `sampled` gradients, EFFECT_NUMBERS and EXTREMES."""

    sampled: int
    numbers: list[float | None]
    extremes: tuple[float | None, ...]


@dataclass(slots=True)
class Measured:
    """Sums and extremes of the numbers of each slot.

    `sums` are (slots, 2, numbers), the sums of the numbers and the counts of gradients that have
    each. The columns of `extremes` are the largest norm before the transform, its step, the step of
    the first gradient with an entry that is not finite, and the place of that gradient among all
    measured ones. They are -1 where there is none.
    """

    sums: Array = field(default_factory=lambda: np.zeros((0, 2, len(EFFECT_NAMES))))
    extremes: Array = field(default_factory=lambda: np.zeros((0, 4)))

    def fit(self, size: int) -> None:
        """Add rows for new slots."""
        if more := size - len(self.sums):
            self.sums = np.concatenate([self.sums, np.zeros((more, *self.sums.shape[1:]))])
            self.extremes = np.concatenate([self.extremes, np.full((more, 4), -1.0)])

    def add(
        self, slots: NDArray[np.int64], numbers: Array, steps: NDArray[np.int64], start: int
    ) -> None:
        """Add numbers of pairs, measured from place `start` on; of equal norms the first counts."""
        # `sums[slots] += numbers` would add one of several pairs of a slot alone.
        np.add.at(self.sums, slots, numbers)
        norms, counts = numbers[:, 0, 0], numbers[:, 0, NONFINITE]
        has_nonfinite = counts.any()
        if has_nonfinite:  # an infinite norm of finite entries has overflowed, and is the largest
            norms = np.where(np.isfinite(norms) | (counts == 0), norms, np.nan)
        largest = self.extremes[:, 0]
        earlier = largest[slots]
        np.fmax.at(largest, slots, norms)  # fmax: a NaN is no largest norm
        # In reverse, because of several assignments to one row NumPy keeps the last.
        rows = np.flatnonzero((norms == largest[slots]) & (norms > earlier))[::-1]
        self.extremes[slots[rows], 1] = steps[rows]
        if has_nonfinite:
            rows = np.flatnonzero((counts > 0) & (self.extremes[slots, 2] < 0))[::-1]
            self.extremes[slots[rows], 2] = steps[rows]
            self.extremes[slots[rows], 3] = start + rows

    def clear(self) -> None:
        """Forget all numbers."""
        self.sums[:], self.extremes[:] = 0, -1

    def merge(self, later: "Measured") -> None:
        """Add the numbers of the same slots over later steps."""
        self.sums += later.sums
        is_larger = later.extremes[:, 0] > self.extremes[:, 0]
        self.extremes[is_larger, :2] = later.extremes[is_larger, :2]
        is_first = self.extremes[:, 2] < 0
        self.extremes[is_first, 2:] = later.extremes[is_first, 2:]

    def sampled(self) -> list[int]:
        """How many gradients of each slot were measured."""
        return self.sums[:, 1, 0].astype(int).tolist()

    def values(self) -> list[Values]:
        """The values of each slot, for a row of effects."""
        sums, counts = self.sums[:, 0], self.sums[:, 1]
        with np.errstate(all="ignore"):
            means: list[list[float | None]] = (sums / counts).tolist()
        if not counts.all():
            for slot, number in np.argwhere(counts == 0).tolist():
                means[slot][number] = None
        # Slots in which every gradient was finite have place -1, and so rank 0.
        places = sorted({-1, *self.extremes[:, 3].tolist()})
        ranks = {place: rank for rank, place in enumerate(places)}
        totals = sums[:, NONFINITE].astype(int).tolist()
        values = []
        for sampled, numbers, total, (norm, step, first, place) in zip(
            self.sampled(), means, totals, self.extremes.tolist(), strict=True
        ):
            numbers[NONFINITE] = total
            largest = (None, None) if step < 0 else (norm, int(step))
            since = (None, None) if first < 0 else (int(first), ranks[place])
            values.append(Values(sampled, numbers, largest + since))
        return values
