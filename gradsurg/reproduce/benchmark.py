"""The benchmark of gradient surgery: methods, tuned alike, on tasks whose losses conflict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.stats import Difference, chances_of_interval, paired_difference, power

SUM, ALONE, LARGER, TUNED_SUM = "sum", "alone_", "larger_", "tuned_sum"
MIN_LOST = 0.1
"""Least share of steps in which the plain sum raises a loss, for a task to be admitted."""
MIN_SPLITS = 3
"""Least number of splits to treat splits as the random factor; with fewer, seeds are."""
GAINS = (0.02, 0.05)
Key = tuple[int, int]
"""Split and seed."""
Size = Annotated[int, Field(ge=1)]
Verdict = Literal["better", "equivalent", "worse", "undecided"]


@validated
class TaskSpec:
    """A task: its losses, the key that makes them conflict, and its values, the quick form's first.

    `losses` has for each the loss of a model that learns nothing of it, at which an excess is 1.
    """

    losses: dict[str, float]
    key: str
    levels: tuple[float, ...]


@validated
class FormSpec:
    """A form, quick or full: how many levels, splits and seeds, the methods (all if empty), tuning.

    `tune` is that of all methods; empty: of each method's own file.
    """

    levels: Size
    splits: Size
    seeds: Size
    tune_seeds: Size
    tune: str = ""
    methods: tuple[str, ...] = ()


@validated
class Benchmark:
    """The content of `benchmark.yaml`; methods that differ by less than `margin` are equivalent.

    `tune` is the tuning of the weighted sums for forms without a tuning of their own.
    """

    margin: Annotated[float, Field(gt=0)]
    larger: Annotated[float, Field(gt=1)]
    tune: str
    tasks: dict[str, TaskSpec]
    forms: dict[str, FormSpec]

    def sums(self, task: str) -> dict[str, list[float]]:
        """The weights of the sums by name: of one loss alone, and of all with one larger."""
        count = range(len(self.tasks[task].losses))
        alone = {f"{ALONE}{i}": [float(i == j) for j in count] for i in count}
        larger = {f"{LARGER}{i}": [self.larger if i == j else 1.0 for j in count] for i in count}
        return alone | larger


@dataclass(frozen=True)
class Cell:
    """A method at a level of a task: rows of split, seed and the test losses, and means of runs.

    `words` are the runner's overrides, `digest` is a hash of the files that it reads, `chosen` are
    the values from the tuning, some perhaps `at_edge` of their range, and `validation` is their
    score. `lost` is the share of measured steps that raise a loss to first order, None if not
    measured.
    """

    task: str
    level: float
    method: str
    words: tuple[str, ...]
    digest: str
    chosen: dict[str, object]
    at_edge: bool
    validation: float
    rows: tuple[tuple[float, ...], ...]
    diverged: int
    seconds: float
    lost: float | None

    @cached_property
    def losses(self) -> dict[Key, tuple[float, ...]]:
        """The test losses by split and seed."""
        return {(int(split), int(seed)): tuple(rest) for split, seed, *rest in self.rows}

    def mean(self, split: int | None = None) -> tuple[float, ...]:
        """The mean of each loss, over all runs or the runs of a split."""
        rows = [row for (own, _), row in self.losses.items() if split in (None, own)]
        return tuple(map(fmean, zip(*rows, strict=True)))


def with_tuned_sum(cells: Sequence[Cell]) -> list[Cell]:
    """Add the weighted sum with the least validation loss, under the name `tuned_sum`."""
    sums = [one for one in cells if one.method == SUM or one.method.startswith(LARGER)]
    return [*cells, replace(min(sums, key=lambda one: one.validation), method=TUNED_SUM)]


@dataclass(frozen=True)
class Level:
    """The cells of a level of a task, by method."""

    cells: Mapping[str, Cell]
    constant: Sequence[float]
    margin: float

    @cached_property
    def single(self) -> dict[int, list[float]]:
        """By split, each loss where it was trained alone."""
        alone = [cell for name, cell in self.cells.items() if name.startswith(ALONE)]
        splits = dict.fromkeys(split for split, _ in alone[0].losses)
        return {k: [cell.mean(k)[i] for i, cell in enumerate(alone)] for k in splits}

    def excesses(self, method: str) -> dict[Key, tuple[float, ...]]:
        """The excess of each loss over its value when trained alone, by split and seed.

        (loss - alone) / (constant - alone): 0 if as low as alone; at most 1, nothing learned.
        """
        return {
            key: tuple(
                min(1.0, (own - alone) / (constant - alone))
                for own, alone, constant in zip(
                    row, self.single[key[0]], self.constant, strict=True
                )
            )
            for key, row in self.cells[method].losses.items()
        }

    def excess(self, method: str) -> dict[Key, float]:
        """The mean of the excesses over the losses."""
        return {key: fmean(row) for key, row in self.excesses(method).items()}

    def mean_excess(self, method: str) -> float:
        """The mean over losses and runs."""
        return fmean(self.excess(method).values())

    def difference(self, method: str, other: str = SUM) -> Difference:
        """The paired differences of the excess to another method's.

        With three or more splits, there is one difference for each split, the mean over its seeds:
        splits are the random factor. With fewer, there is one for each seed, and the result holds
        for these splits alone.
        """
        return self._paired(self.excess(method), self.excess(other))

    def _paired(self, own: Mapping[Key, float], others: Mapping[Key, float]) -> Difference:
        pairs: dict[object, list[tuple[float, float]]] = {}
        for key in own.keys() & others.keys():
            group = key[0] if len(self.single) >= MIN_SPLITS else key
            pairs.setdefault(group, []).append((own[key], others[key]))
        means = [tuple(map(fmean, zip(*pairs[key], strict=True))) for key in sorted(pairs, key=str)]
        return paired_difference([a for a, _ in means], [b for _, b in means])

    def verdict(self, method: str, other: str = SUM) -> Verdict:
        """Return the relation to another method, by the whole 95 % t interval."""
        difference = self.difference(method, other)
        low, high = difference.t_low, difference.t_high
        if low is None or high is None:
            return "undecided"
        if -self.margin <= low and high <= self.margin:
            return "equivalent"
        return "better" if high < 0 else "worse" if low > 0 else "undecided"

    @property
    def gaps(self) -> list[Difference]:
        """For each loss, the tuned sum's value minus the value when trained alone."""
        joint = self.cells[TUNED_SUM].losses
        gaps = []
        for i in range(len(self.constant)):
            alone = self.cells[f"{ALONE}{i}"].losses
            pair = [{key: row[i] for key, row in rows.items()} for rows in (joint, alone)]
            gaps.append(self._paired(*pair))
        return gaps

    @property
    def is_admitted(self) -> bool:
        """Whether each loss is lower alone, and the plain sum raises one in enough steps."""
        apart = all(gap.t_low is not None and gap.t_low > 0 for gap in self.gaps)
        return apart and (self.cells[SUM].lost or 0.0) >= MIN_LOST

    def front_gain(self, method: str) -> float:
        """By how much a method's mean extends the hypervolume of the front of weighted sums.

        In excesses, below 1: the front of all losses at their optimum has a volume of 1.
        """
        names = [name for name in self.cells if name == SUM or name.startswith((LARGER, ALONE))]
        points = [self._point(name) for name in names]
        reference = [1.0] * len(self.constant)
        whole = hypervolume(points, reference)
        return hypervolume([*points, self._point(method)], reference) - whole

    def _point(self, method: str) -> tuple[float, ...]:
        return tuple(map(fmean, zip(*self.excesses(method).values(), strict=True)))

    def chances(self) -> list[float]:
        """The probability of finding each of `GAINS`, and of `equivalent` if the true gain is 0.

        The spread is the median over the methods that are no sums, of differences to the plain sum.
        """
        sums = (SUM, TUNED_SUM)
        others = [x for x in self.cells if x not in sums and not x.startswith((ALONE, LARGER))]
        spreads = sorted((self.difference(name) for name in others), key=lambda one: one.sd or 0.0)
        typical = spreads[len(spreads) // 2]
        if not typical.sd:
            return [1.0] * (len(GAINS) + 1)
        centred = [value - typical.mean for value in typical.differences]
        (same, _), _ = chances_of_interval(centred, -self.margin, self.margin)
        return [*(power(typical.n, typical.sd, gain) for gain in GAINS), same]


def hypervolume(points: Sequence[tuple[float, ...]], reference: Sequence[float]) -> float:
    """Return the volume that points dominate below a reference, where less is better.

    By slices along the last coordinate (Zitzler and Thiele 1998 define it).
    """
    inside = [p for p in points if all(a < b for a, b in zip(p, reference, strict=True))]
    if len(reference) == 1:
        return max((reference[0] - p[0] for p in inside), default=0.0)
    cuts = [*sorted({p[-1] for p in inside}), reference[-1]]
    slices = (
        (upper - lower) * hypervolume([p[:-1] for p in inside if p[-1] <= lower], reference[:-1])
        for lower, upper in pairwise(cuts)
    )
    return sum(slices)
