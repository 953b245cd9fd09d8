"""How the tasks of runs conflict: means over steps and runs, and how they change on the way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from gradsurg.report.grouping import Arm
from gradsurg.stats import t_reach
from gradsurg.training.frames import read_conflicts

NUM_INTERVALS = 30  # into which a run's steps are cut
MAX_NUMBERS = 240_000  # of all series together, so that a page stays small
MAX_PAIRS = 28  # of a map: all of eight tasks
MAX_TASKS = 8  # lines of a panel that are told apart
ROUNDING = 1e-6  # of a cosine, in float32
SINGLE = ("conflict_rate", "norm_spread", "norm_to_mean", "cosine_to_mean")
OF_TASKS = ("norms", "weights", "decrease")

Floats = NDArray[np.float64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class ConflictMeans:
    """Of the gradients of some tasks in one group: means over a run's steps, then over the runs.

    `lost` is the share of steps at which the update, to first order, raises the loss of each task:
    at which it has a cosine below -`ROUNDING` with the gradient. `weights` is empty where there are
    none. `others` has for other aggregators the cosine of their update to the one that was made,
    and their weights; the nearest comes first. A star at its name says that one has no answer at
    some of the steps, as where a loss is below zero: its mean is of others than that beside it.
    """

    tasks: list[str]
    measured: list[int]  # steps of each run
    not_finite: int  # steps of all runs at which a gradient was not finite
    single: Mapping[str, float]
    cosines: Floats
    norms: Floats
    weights: Floats
    decrease: Floats
    lost: Floats
    others: Mapping[str, tuple[float, Floats]]

    @property
    def runs(self) -> int:
        return len(self.measured)

    @property
    def steps(self) -> int:
        """Measured steps of all runs."""
        return sum(self.measured)

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of tasks, those that conflict most first."""
        return _by_cosine(self.cosines)


@dataclass(frozen=True)
class Lines:
    """Over intervals of steps, a line for each task: the mean over runs and its interval."""

    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class ConflictSeries:
    """The conflicts of one arm in one group, interval by interval.

    `name` is that of the arm, with the group where there are several in the study.
    `cosines` has a row for each of `pairs`; `weights`, if there are any, and `decrease` a line for
    each of `shown`, which are places in the means' tasks.
    """

    name: str
    arm: Arm
    group: str
    means: ConflictMeans
    ends: list[int]
    pairs: list[Pair]
    cosines: Floats
    shown: list[int]
    weights: Lines | None
    decrease: Lines


def pair_name(tasks: Sequence[str], pair: Pair) -> str:
    return f"{tasks[pair[0]]} ~ {tasks[pair[1]]}"


def load_conflicts(arms: Sequence[Arm]) -> tuple[pl.DataFrame, list[str]]:
    """All runs' conflicts with `run`, the directory's name, and what could not be read."""
    frames, faults = [read_conflicts([])], []
    for run in (run for arm in arms for run in arm.runs if run.state != "missing"):
        try:
            frame = read_conflicts([run.path])
        except (ValueError, pl.exceptions.PolarsError) as error:
            faults.append(f"{run.name}: {' '.join(str(error).split())}")
            continue
        if len(frame):
            frames.append(frame.with_columns(pl.lit(run.name).alias("run")))
    return pl.concat(frames, how="diagonal_relaxed"), faults


def conflict_series(arms: Sequence[Arm], rows: pl.DataFrame) -> list[ConflictSeries]:
    """One for each arm and group; all that have the same tasks show the same ones of them."""
    found = [
        (arm, *key, own)
        for arm in arms
        for *key, own in by_group(rows.filter(pl.col("run").is_in([r.name for r in arm.runs])))
    ]
    means = [conflict_means(own) for *_, own in found]
    keys = dict.fromkeys(tuple(one.tasks) for one in means)
    chosen = {key: _chosen([one for one in means if tuple(one.tasks) == key]) for key in keys}
    sizes = [[len(part) for part in chosen[tuple(one.tasks)]] for one in means]
    size = sum(pairs + 6 * tasks for pairs, tasks in sizes)  # of two panels three lines each
    intervals = max(4, min(NUM_INTERVALS, MAX_NUMBERS // max(1, size)))
    several = any(group != "shared" for _, _, group, _ in found)
    return [
        _series(
            f"{arm.name} at {group}" if several else arm.name,
            arm,
            group,
            own,
            mean,
            *chosen[tuple(mean.tasks)],
            intervals,
        )
        for (arm, _, group, own), mean in zip(found, means, strict=True)
    ]


def by_group(rows: pl.DataFrame) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """Aggregator, group and rows of what has the same tasks in the same order."""
    keys = ["aggregator", "group", pl.col("tasks").list.join("\n").alias("of")]
    for (aggregator, group, _), own in rows.group_by(keys, maintain_order=True):
        yield str(aggregator), str(group), own


def conflict_means(rows: pl.DataFrame) -> ConflictMeans:
    """Of rows of one aggregator, group and set of tasks."""
    tasks = rows["tasks"][0].to_list()
    runs = [frame for _, frame in rows.group_by("run", maintain_order=True)]
    per_run = [_numbers(frame, len(tasks)) for frame in runs]
    found = {
        key: _mean(np.stack([_mean(own[key]) for own in per_run if len(own[key])]))
        for key in per_run[0]
        if any(len(own[key]) for own in per_run)
    }
    others = {
        name: (float(found[f"others.{key}.cosine"]), found[f"others.{key}.weights"])
        for key, name in _answering(per_run).items()
    }
    empty = np.zeros(0)
    return ConflictMeans(
        tasks,
        [*map(len, runs)],
        sum(int((~np.isfinite(own["norms"])).any(axis=1).sum()) for own in per_run),
        {name: float(found[name]) for name in SINGLE},
        found["cosines"],
        found["norms"],
        found.get("weights", empty),
        found["decrease"],
        found["lost"],
        dict(sorted(others.items(), key=lambda item: -item[1][0])),
    )


def _answering(per_run: Sequence[Mapping[str, Floats]]) -> dict[str, str]:
    """The other aggregators that have a cosine at any step, with a star if not at all of those at
    which any has.
    """
    keys = [key for key in per_run[0] if key.endswith(".cosine")]
    known = {key: np.concatenate([np.isfinite(own[key]) for own in per_run]) for key in keys}
    asked = sum(known.values()) > 0
    found = {}
    for key, there in known.items():
        if there.any():
            name = key.split(".")[1]
            found[name] = name if np.array_equal(there, asked) else f"{name}*"
    return found


def _numbers(rows: pl.DataFrame, count: int) -> dict[str, Floats]:
    """Each number of a run's rows, step by step; where lists are lacking no step is told."""
    found = {name: rows[name].to_numpy().astype(np.float64) for name in SINGLE}
    wide = [name for name in rows.columns if name.endswith(".weights")]
    for name in (*OF_TASKS, *wide):
        lists = rows[name].to_list()
        whole = [own if own and len(own) == count else [None] * count for own in lists]
        there = any(own for own in lists)
        found[name] = np.array(whole if there or name in wide else [], np.float64)
    found["cosines"] = np.array(rows["cosines"].to_list(), np.float64)
    for name in (name for name in rows.columns if name.endswith(".cosine")):
        found[name] = rows[name].cast(pl.Float64).to_numpy().astype(np.float64)
    found["lost"] = _lost(found)
    return found


def _lost(found: Mapping[str, Floats]) -> Floats:
    """1 where the update has a negative cosine with a task's gradient, beyond rounding."""
    norms, decrease = found["norms"], found["decrease"]
    products = found["cosines"] * norms[:, :, None] * norms[:, None, :]
    mean = np.sqrt(np.maximum(products.mean(axis=(1, 2)), 0.0))
    length = np.nan_to_num(mean * found["norm_to_mean"])  # 0 where the mean is
    lost = decrease < -ROUNDING * np.nan_to_num(norms) * length[:, None]
    return np.where(np.isfinite(decrease), lost, np.nan)


def _mean(values: Floats) -> Floats:
    """Over the first axis, of what is finite; NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _chosen(means: Sequence[ConflictMeans]) -> tuple[list[Pair], list[int]]:
    """Of many pairs those that conflict most, of many tasks those that gain least and most."""
    pairs = _by_cosine(_mean(np.stack([one.cosines for one in means])))
    gains = np.nan_to_num(_mean(np.stack([one.decrease for one in means])))
    order = np.argsort(gains, kind="stable").tolist()
    half = MAX_TASKS // 2
    shown = order if len(order) <= MAX_TASKS else [*order[:half], *order[-half:]]
    return pairs[:MAX_PAIRS], sorted(shown)


def _by_cosine(cosines: Floats) -> list[Pair]:
    """The pairs, least cosine first; one that is not known stands last."""
    pairs = [(first, second) for second in range(len(cosines)) for first in range(second)]
    return sorted(pairs, key=lambda pair: np.nan_to_num(cosines[pair[1], pair[0]], nan=2.0))


def _series(
    name: str,
    arm: Arm,
    group: str,
    rows: pl.DataFrame,
    means: ConflictMeans,
    pairs: list[Pair],
    shown: list[int],
    num_intervals: int,
) -> ConflictSeries:
    steps = rows["step"].unique().sort().to_list()
    count = min(num_intervals, len(steps))
    ends = [steps[(k + 1) * len(steps) // count - 1] for k in range(count)]
    runs = [frame for _, frame in rows.group_by("run", maintain_order=True)]
    cut = {name: [] for name in ("cosines", "weights", "decrease")}
    for frame in runs:
        numbers = _numbers(frame, len(means.tasks))
        places = np.searchsorted(ends, frame["step"].to_numpy())
        for key, own in cut.items():
            if len(numbers[key]):
                own.append(np.stack([_mean(numbers[key][places == k]) for k in range(count)]))
    first, second = ([pair[end] for pair in pairs] for end in (0, 1))
    cosines = _mean(np.stack(cut["cosines"]))[:, second, first].T
    return ConflictSeries(
        name,
        arm,
        group,
        means,
        ends,
        pairs,
        cosines,
        shown,
        _lines(np.stack(cut["weights"])[:, :, shown]) if cut["weights"] else None,
        _lines(np.stack(cut["decrease"])[:, :, shown]),
    )


def _lines(values: Floats) -> Lines:
    """Of numbers by run, interval and task."""
    mean = _mean(values)
    known = np.isfinite(values).sum(axis=0)
    spread = np.sqrt(_mean((values - mean) ** 2) * known / np.maximum(known - 1, 1))
    reaches = {n: t_reach(n) if n > 1 else np.nan for n in range(len(values) + 1)}
    reach = np.vectorize(reaches.__getitem__, otypes=[float])(known)
    reach = reach * spread / np.sqrt(np.maximum(known, 1))
    return Lines(mean.T, (mean - reach).T, (mean + reach).T)
