"""Series over the steps: learning curves, effects on gradients, norms, trajectories, updates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import fmean
from typing import Any

import polars as pl

from gradsurg.effects.numbers import UPDATE_NUMBERS, UPDATES_SAMPLED
from gradsurg.effects.tables import number
from gradsurg.report.load import Arm, LoadedRun, canonical, group, run_frames
from gradsurg.report.wording import HEADLINE
from gradsurg.stats import t_critical
from gradsurg.training.frames import METRICS_KEYS, read_effects, read_metrics
from gradsurg.training.run_directory import LANDSCAPE, NOT_FINITE
from gradsurg.training.run_reader import BrokenFile, read_json

MAX_POINTS = 60  # of a learning curve: more are not seen on a page


@dataclass(frozen=True)
class Curve:
    """A metric of one arm over steps: mean and interval of its finished runs, and each run."""

    arm: Arm
    metric: str
    steps: list[int]
    n: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    runs: dict[str, list[float | None]]


def load_metrics(arms: Sequence[Arm]) -> tuple[pl.DataFrame, list[str]]:
    """Return the metrics of all runs, with the directory's name in `run`, and read errors."""
    by_run, faults = run_frames(arms, read_metrics)
    frames = [pl.DataFrame(schema={"run": pl.String, "step": pl.Int64})]
    for name, frame in by_run.items():
        numbers = [key for key in frame.columns if key not in (*METRICS_KEYS, NOT_FINITE)]
        casts = [pl.col(key).cast(pl.Float64, strict=False) for key in numbers]
        frames.append(frame.select(pl.lit(name).alias("run"), "step", *casts))
    return pl.concat(frames, how="diagonal_relaxed"), faults


def curve_metrics(metrics: pl.DataFrame) -> list[str]:
    """Return the names of the logged metrics, the headline first."""
    names = [name for name in metrics.columns if name not in (*METRICS_KEYS, UPDATES_SAMPLED)]
    first = [name for name in HEADLINE if name in names]
    return list(dict.fromkeys([*first, *names]))


def curves(arms: Sequence[Arm], metrics: pl.DataFrame) -> list[Curve]:
    """A curve for each arm and each metric that it has logged."""
    by_run = {
        str(key[0]): frame for key, frame in metrics.partition_by("run", as_dict=True).items()
    }
    arm_curves = []
    for metric in curve_metrics(metrics):
        for arm in arms:
            values = {}
            for run in arm.runs:
                if run.name in by_run:
                    points = by_run[run.name].select("step", metric).drop_nulls().unique("step")
                    values[run.name] = dict(points.iter_rows())
            if any(values.values()):
                arm_curves.append(_curve(arm, metric, values))
    return arm_curves


def _curve(arm: Arm, metric: str, values: Mapping[str, Mapping[int, float]]) -> Curve:
    steps = _thinned(sorted({step for at_step in values.values() for step in at_step}))
    whole = {run.name for run in arm.runs if run.state != "diverged"}
    reaches: dict[int, float] = {}
    n, means, lows, highs = [], [], [], []
    for step in steps:
        at_step = [row[step] for name, row in values.items() if name in whole and step in row]
        mean = sum(at_step) / len(at_step) if at_step else None
        n.append(len(at_step))
        means.append(mean)
        if mean is None or len(at_step) < 3:  # as in a verdict: two seeds have no interval
            lows.append(None)
            highs.append(None)
            continue
        if len(at_step) not in reaches:
            reaches[len(at_step)] = t_critical(len(at_step))
        variance = sum((value - mean) ** 2 for value in at_step) / (len(at_step) - 1)
        reach = reaches[len(at_step)] * sqrt(variance / len(at_step))
        lows.append(mean - reach)
        highs.append(mean + reach)
    single = {name: [row.get(step) for step in steps] for name, row in values.items()}
    return Curve(arm, metric, steps, n, means, lows, highs, single)


def _thinned(steps: list[int]) -> list[int]:
    """At most MAX_POINTS of them, the first and the last among these."""
    if len(steps) <= MAX_POINTS:
        return steps
    places = [round(k * (len(steps) - 1) / (MAX_POINTS - 1)) for k in range(MAX_POINTS)]
    return [steps[place] for place in places]


MAX_CELLS = 110_000  # of all effect maps together, so that a page stays small
NUM_INTERVALS = 24  # into which a run's steps are cut
NUM_BINS = 40  # of a histogram
MEASURES = ("cosine", "ratio", "changed", "flipped", "zeroed")


@dataclass(frozen=True)
class EffectMap:
    """The effect of one transform in one arm: for each measure a row of numbers for each site."""

    arm: Arm
    transform: str
    n: int
    sites: list[str]
    ends: list[int]
    means: dict[str, list[list[float | None]]]
    overall: dict[str, list[float | None]]


@dataclass(frozen=True)
class Norms:
    """Histograms of gradient norms (bins of log10), before and after a transform."""

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
    """The rows of all effects.jsonl files, and an error for each file that could not be read."""

    rows: pl.DataFrame
    faults: list[str]


def load_effects(arms: Sequence[Arm]) -> Effects:
    """Return the effects of all runs, with the directory's name in `run`, and read errors."""
    by_run, faults = run_frames(arms, read_effects)
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
        for name, frame in by_run.items()
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
            arm_rows = pl.concat(frames)
            for (name,), frame in arm_rows.partition_by(
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
        for name, mean in zip(MEASURES, numbers, strict=True):
            means[name][lines[site]][interval] = mean
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
    counts = dict(rows.iter_rows())
    return [counts.get(number, 0) / total if total else 0.0 for number in range(NUM_BINS)]


def _zeros(norms: pl.DataFrame) -> float:
    total = norms["sampled"].sum()
    return (
        float(norms.filter(pl.col("norm") == 0)["sampled"].sum()) / float(total) if total else 0.0
    )


X1, X2 = "test/x1", "test/x2"
MAX_PLACES = 400  # of a way: more are not seen


@dataclass(frozen=True)
class Trajectory:
    """The points that one run passed through, from its start to its last logged point."""

    seed: int
    x1: list[float]
    x2: list[float]


@dataclass(frozen=True)
class ArmTrajectories:
    """The trajectories of one arm, one for each starting point."""

    name: str
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Landscape:
    """The losses of a task on a grid, rows along x2, its Pareto set, and the trajectories of
    each arm.
    """

    task: str
    x1: list[float]
    x2: list[float]
    values: Mapping[str, list[list[float]]]
    pareto: list[list[float]]
    arms: list[ArmTrajectories]

    @property
    def mean(self) -> list[list[float]]:
        """The mean of the losses on the grid."""
        tables = zip(*self.values.values(), strict=True)
        count = len(self.values)
        return [[sum(cells) / count for cells in zip(*rows, strict=True)] for rows in tables]


def landscapes(arms: Sequence[Arm], metrics: pl.DataFrame) -> tuple[list[Landscape], list[str]]:
    """Return a landscape for each task that has one, and read errors.

    Runs that differ in where they start, or in their seed, stand together under one name.
    """
    contents: dict[str, dict[str, Any]] = {}  # Any: what JSON can hold
    runs: dict[str, list[tuple[LoadedRun, list[float]]]] = {}
    faults: list[str] = []
    for run in (run for arm in arms for run in arm.runs if run.is_readable):
        try:
            content = read_json(run.path / LANDSCAPE)
        except BrokenFile as error:
            faults.append(f"{run.name}: {error}")
            continue
        if content is None:
            continue
        if not {"start", "values"} <= content.keys():
            faults.append(f"{run.name}: {LANDSCAPE} has no start or no values")
            continue
        start = content.pop("start")
        key = canonical(content)
        contents[key] = content
        runs.setdefault(key, []).append((run, start))
    return [_landscape(contents[key], same, metrics) for key, same in runs.items()], faults


def _landscape(
    content: Mapping[str, Any],  # Any: what JSON can hold
    runs: Sequence[tuple[LoadedRun, list[float]]],
    metrics: pl.DataFrame,
) -> Landscape:
    starts = {run.name: start for run, start in runs}
    arms = []
    for arm in group([replace(run, config=_startless(run.config)) for run, _ in runs]):
        ways = [_trajectory(run, starts[run.name], metrics) for run in arm.runs]
        arms.append(
            ArmTrajectories(
                arm.name, sorted(ways, key=lambda way: (way.x1[0], way.x2[0], way.seed))
            )
        )
    pareto = (
        [*content["pareto"], content["pareto"][0]] if content.get("closed") else content["pareto"]
    )
    config = (runs[0][0].config or {}).get("task")
    task = str(config.get("name", "")) if isinstance(config, Mapping) else ""
    return Landscape(task, content["x1"], content["x2"], content["values"], pareto, arms)


def _startless(config: Mapping[str, Any] | None) -> dict[str, Any] | None:  # Any: YAML's values
    if not config or not isinstance(config.get("task"), Mapping):
        return dict(config) if config else None
    task = {key: item for key, item in config["task"].items() if key != "start"}
    return {**config, "task": task}


def _trajectory(run: LoadedRun, start: list[float], metrics: pl.DataFrame) -> Trajectory:
    """Return the trajectory from the start over the logged points to the end, up to a non-finite
    one.
    """
    places = [(start[0], start[1])]
    if X1 in metrics.columns and X2 in metrics.columns:
        rows = metrics.filter(pl.col("run") == run.name).select("step", X1, X2)
        logged = rows.drop_nulls().unique("step").sort("step")
        places += [(x1, x2) for _, x1, x2 in logged.iter_rows()]
    summary = run.summary or {}
    x1, x2 = summary.get(X1), summary.get(X2)
    if isinstance(x1, int | float) and isinstance(x2, int | float) and (x1, x2) != places[-1]:
        places.append((x1, x2))
    whole = [place for place in places if isfinite(place[0]) and isfinite(place[1])]
    if len(whole) > MAX_PLACES:
        last = len(whole) - 1
        whole = [whole[round(k * last / (MAX_PLACES - 1))] for k in range(MAX_PLACES)]
    return Trajectory(run.seed, [x1 for x1, _ in whole], [x2 for _, x2 in whole])


Summary = Mapping[str, Any]  # Any: what JSON can hold

NUMBERS = {number.name: number.label for number in UPDATE_NUMBERS}

ABOUT = (
    "The update that was made beside the one there would have been without the surgery, from the "
    "same weights and the same batch; loss change is what a step does to the loss of its batch."
)


def asked(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries of runs that measured the update effect."""
    return [summary for summary in summaries if summary.get(UPDATES_SAMPLED)]


def known(summaries: Sequence[Summary], key: str) -> list[float]:
    """Return a number of each run; an update of zero has no cosine."""
    values = [summary.get(key) for summary in summaries]
    return [float(value) for value in values if value is not None]


def update_line(summaries: Sequence[Summary]) -> str:
    """Describe the update effect in one sentence, over the runs that measured it; empty if none
    did.
    """
    measured = asked(summaries)
    if not measured:
        return ""
    cosine, norm_ratio, change, without = (_mean(measured, key) for key in NUMBERS)
    return (
        f"Updates ({of_how_much(measured)}), beside those without the surgery: cosine {cosine}, "
        f"norm ratio {norm_ratio}; a step changes the loss of its batch by {change}, without the "
        f"surgery by {without}."
    )


def of_how_much(summaries: Sequence[Summary]) -> str:
    """`60 steps of 3 runs`."""
    steps = sum(summary[UPDATES_SAMPLED] for summary in summaries)
    runs = f"{len(summaries)} run{'s' if len(summaries) > 1 else ''}"
    return f"{steps} step{'s' if steps > 1 else ''} of {runs}"


def _mean(summaries: Sequence[Summary], key: str) -> str:
    values = known(summaries, key)
    return number(fmean(values)) if values else "-"
