"""What transforms did along the way: the effect at each site, the norms of gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from gradsurg.report.grouping import Arm
from gradsurg.report.run_frames import run_frames
from gradsurg.training.frames import read_effects

MAX_CELLS = 240_000  # of all effect maps together, so that a page stays small
NUM_INTERVALS = 24  # into which a run's steps are cut
NUM_BINS = 40  # of a histogram
MEASURES = ("cosine", "ratio", "changed", "flipped", "zeroed")


@dataclass(frozen=True)
class EffectMap:
    """What one transform did in one arm: for each measure a row of numbers for each site."""

    arm: Arm
    transform: str
    n: int
    sites: list[str]
    ends: list[int]
    means: dict[str, list[list[float | None]]]
    overall: dict[str, list[float | None]]


@dataclass(frozen=True)
class Norms:
    """How often gradient norms fell into each bin (of log10), before and after a transform."""

    arm: Arm
    transform: str
    n: int
    low: float
    high: float
    before: list[float]
    after: list[float] | None
    zero_before: float
    zero_after: float


@dataclass(frozen=True)
class Effects:
    """All that the runs' effects.jsonl say, and which of these files could not be read."""

    rows: pl.DataFrame
    faults: list[str]


def load_effects(arms: Sequence[Arm]) -> Effects:
    """All runs' effects with `run`, the directory's name, and what could not be read."""
    found, faults = run_frames(arms, read_effects)
    frames = [
        frame.with_columns(
            pl.lit(name).alias("run").cast(pl.Categorical),
            pl.col("transform", "site").cast(pl.Categorical),
            *[
                pl.col(key).cast(pl.Float64)
                for key in frame.columns
                if frame.schema[key] == pl.Null
            ],
        )
        for name, frame in found.items()
    ]
    return Effects(pl.concat(frames, how="diagonal_relaxed") if frames else _no_rows(), faults)


def effect_maps(arms: Sequence[Arm], effects: Effects) -> list[EffectMap]:
    """Means over runs for each site and interval of steps, an arm's transforms one by one."""
    combinations = list(_of_each(arms, effects.rows))
    sites = sum(frame["site"].n_unique() for _, _, frame in combinations)
    room = MAX_CELLS // max(1, sites * len(MEASURES))
    return [
        _map(arm, name, frame, max(4, min(NUM_INTERVALS, room)))
        for arm, name, frame in combinations
    ]


def norms(arms: Sequence[Arm], effects: Effects) -> list[Norms]:
    """Histograms over all sites and measured steps; each arm's two share their bins."""
    return [_norms(arm, name, frame) for arm, name, frame in _of_each(arms, effects.rows)]


def _no_rows() -> pl.DataFrame:
    names = ("cosine", "norm_before", "norm_after", "changed", "flipped", "zeroed")
    text = dict.fromkeys(("run", "transform", "site"), pl.Categorical)
    return pl.DataFrame(
        schema={**text, "step": pl.Int64, "sampled": pl.Int64, **dict.fromkeys(names, pl.Float64)}
    )


def _of_each(arms: Sequence[Arm], rows: pl.DataFrame) -> Iterator[tuple[Arm, str, pl.DataFrame]]:
    """The measured rows of each arm and transform, in the order of arms and of the chain."""
    numbers = ["cosine", "norm_before", "norm_after", "changed", "flipped", "zeroed"]
    rows = rows.filter(pl.col("sampled") > 0).select(
        "run", "step", "transform", "site", "sampled", *numbers
    )
    by_run = {str(key[0]): frame for key, frame in rows.partition_by("run", as_dict=True).items()}
    for arm in arms:
        frames = [by_run[run.name] for run in arm.runs if run.name in by_run]
        if frames:
            own = pl.concat(frames)
            for (name,), frame in own.partition_by(
                "transform", as_dict=True, maintain_order=True
            ).items():
                yield arm, str(name), frame


def _map(arm: Arm, transform: str, rows: pl.DataFrame, num_intervals: int) -> EffectMap:
    steps = rows["step"].unique().sort().to_list()
    count = min(num_intervals, len(steps))
    first, last = min(0, steps[0]), steps[-1]
    width = max(1.0, (last - first) / count)
    place = ((pl.col("step") - first - 1) / width).floor().clip(0, count - 1).cast(pl.Int64)
    rows = rows.with_columns(
        place.alias("place"),
        pl.when(pl.col("norm_before") > 0)
        .then(pl.col("norm_after") / pl.col("norm_before"))
        .alias("ratio"),
    )
    per_run = rows.group_by("site", "place", "run", maintain_order=True).agg(_weighted())
    cells = per_run.group_by("site", "place", maintain_order=True).agg(_plain())
    whole = rows.group_by("site", "run", maintain_order=True).agg(_weighted())
    overall = whole.group_by("site", maintain_order=True).agg(_plain())
    sites = overall["site"].cast(pl.String).to_list()
    lines = {site: row for row, site in enumerate(sites)}
    means: dict[str, list[list[float | None]]] = {
        name: [[None] * count for _ in sites] for name in MEASURES
    }
    for site, interval, *numbers in cells.select("site", "place", *MEASURES).iter_rows():
        for name, number in zip(MEASURES, numbers, strict=True):
            means[name][lines[site]][interval] = number
    return EffectMap(
        arm,
        transform,
        rows["run"].n_unique(),
        sites,
        [round(first + width * (k + 1)) for k in range(count)],
        means,
        {name: overall[name].to_list() for name in MEASURES},
    )


def _weighted() -> list[pl.Expr]:
    """Means in which a row counts as often as gradients were measured in it."""
    return [
        (pl.col(name) * pl.col("sampled")).sum()
        / pl.col("sampled").filter(pl.col(name).is_not_null()).sum()
        for name in MEASURES
    ]


def _plain() -> list[pl.Expr]:
    return [pl.col(name).fill_nan(None).mean() for name in MEASURES]


def _norms(arm: Arm, transform: str, rows: pl.DataFrame) -> Norms:
    before, after = (
        rows.select(pl.col(name).alias("norm"), "sampled").drop_nulls()
        for name in ("norm_before", "norm_after")
    )
    both = pl.concat([before, after]).filter(pl.col("norm") > 0)["norm"].log10()
    ends = (both.min(), both.max()) if len(both) else (0.0, 1.0)
    low, high = (float(end) for end in ends if isinstance(end, int | float))
    high = max(high, low + 0.1)
    shown = transform != "none"
    return Norms(
        arm,
        transform,
        rows["run"].n_unique(),
        low,
        high,
        _counts(before, low, high),
        _counts(after, low, high) if shown else None,
        _zeros(before),
        _zeros(after) if shown else 0.0,
    )


def _counts(norms: pl.DataFrame, low: float, high: float) -> list[float]:
    """Shares of all gradients, bin by bin."""
    total = norms["sampled"].sum()
    place = (pl.col("norm").log10() - low) / (high - low) * NUM_BINS
    rows = (
        norms.filter(pl.col("norm") > 0)
        .group_by(place.floor().clip(0, NUM_BINS - 1).cast(pl.Int64).alias("place"))
        .agg(pl.col("sampled").sum())
    )
    found = dict(rows.iter_rows())
    return [found.get(number, 0) / total if total else 0.0 for number in range(NUM_BINS)]


def _zeros(norms: pl.DataFrame) -> float:
    total = norms["sampled"].sum()
    return (
        float(norms.filter(pl.col("norm") == 0)["sampled"].sum()) / float(total) if total else 0.0
    )
