"""Learning curves: what was logged over steps, an arm at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import polars as pl

from gradsurg.effects.numbers import UPDATES_SAMPLED
from gradsurg.report.grouping import Arm
from gradsurg.report.run_frames import run_frames
from gradsurg.report.wording import HEADLINE
from gradsurg.stats import t_reach
from gradsurg.training.frames import METRICS_KEYS, read_metrics
from gradsurg.training.json_rows import NOT_FINITE

MAX_POINTS = 60  # of a learning curve: more are not seen on a page


@dataclass(frozen=True)
class Curve:
    """A metric of one arm over steps: mean and interval of its whole runs, and every run alone."""

    arm: Arm
    metric: str
    steps: list[int]
    n: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    runs: dict[str, list[float | None]]


def load_metrics(arms: Sequence[Arm]) -> tuple[pl.DataFrame, list[str]]:
    """All runs' metrics with `run`, the directory's name, and what could not be read."""
    own, faults = run_frames(arms, read_metrics)
    frames = [pl.DataFrame(schema={"run": pl.String, "step": pl.Int64})]
    for name, frame in own.items():
        numbers = [key for key in frame.columns if key not in (*METRICS_KEYS, NOT_FINITE)]
        casts = [pl.col(key).cast(pl.Float64, strict=False) for key in numbers]
        frames.append(frame.select(pl.lit(name).alias("run"), "step", *casts))
    return pl.concat(frames, how="diagonal_relaxed"), faults


def curve_metrics(metrics: pl.DataFrame) -> list[str]:
    """What was logged over steps, the headline first."""
    names = [name for name in metrics.columns if name not in (*METRICS_KEYS, UPDATES_SAMPLED)]
    first = [name for name in HEADLINE if name in names]
    return list(dict.fromkeys([*first, *names]))


def curves(arms: Sequence[Arm], metrics: pl.DataFrame) -> list[Curve]:
    """A curve for each arm and each metric that it has logged."""
    by_run = {
        str(key[0]): frame for key, frame in metrics.partition_by("run", as_dict=True).items()
    }
    found = []
    for metric in curve_metrics(metrics):
        for arm in arms:
            values = {}
            for run in arm.runs:
                if run.name in by_run:
                    own = by_run[run.name].select("step", metric).drop_nulls().unique("step")
                    values[run.name] = dict(own.iter_rows())
            if any(values.values()):
                found.append(_curve(arm, metric, values))
    return found


def _curve(arm: Arm, metric: str, values: Mapping[str, Mapping[int, float]]) -> Curve:
    steps = _thinned(sorted({step for own in values.values() for step in own}))
    whole = {run.name for run in arm.runs if run.state != "diverged"}
    reaches: dict[int, float] = {}
    n, means, lows, highs = [], [], [], []
    for step in steps:
        own = [row[step] for name, row in values.items() if name in whole and step in row]
        mean = sum(own) / len(own) if own else None
        n.append(len(own))
        means.append(mean)
        if mean is None or len(own) < 2:
            lows.append(None)
            highs.append(None)
            continue
        if len(own) not in reaches:
            reaches[len(own)] = t_reach(len(own))
        variance = sum((value - mean) ** 2 for value in own) / (len(own) - 1)
        reach = reaches[len(own)] * sqrt(variance / len(own))
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
