"""Judge the bands of a claim by its runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from gradsurg.experiment.run_directory import UNTIL_REACHED
from gradsurg.report.arms import Arm, flat, group
from gradsurg.report.load import LoadedRun
from gradsurg.reproduce.expected import Band, Expected
from gradsurg.stats import (
    chances_of_all,
    chances_of_count,
    chances_of_mean,
    paired_difference,
)

if TYPE_CHECKING:
    from gradsurg.report.study import Study

Studies = Mapping[str, "Study"]

EFFECT = "effect/"
DIVERGED = "diverged"
HOLDS, CONDITIONS = "holds", "holds under conditions"
UNDECIDED = "in the mean; interval undecided"
UNMEASURED, FAILS = "not measured", "does not hold"
REPORTED = "reported"
WEAKEST = (FAILS, UNMEASURED, UNDECIDED)
"""Results of a band that are a paper's verdict if one band has them, the weakest first."""
COUNTED = (UNTIL_REACHED, DIVERGED)
"""Outcomes that a diverged run has."""
MAX_DECIMALS = 6


@dataclass(frozen=True)
class Judgement:
    """A band and the values of its runs; `lacking` says why it could not be judged.

    Of a band `of` dominating arms, the values are 1 or 0 for each arm, 1 for those in `dominating`.
    """

    band: Band
    values: tuple[float, ...] = ()
    lacking: str = ""
    seeds: tuple[int, ...] = ()
    dominating: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        if self.lacking or not self.values:
            return False
        if self.band.of == "mean":
            return self.band.holds(fmean(self.values))
        if self.band.of in ("total", "dominating"):
            return self.band.holds(sum(self.values))
        return all(self.band.holds(value) for value in self.values)

    @property
    def result(self) -> str:
        """`holds`, `does not hold`, or `reported` for a band without bounds.

        A band of a mean whose interval reaches over a bound is `in the mean; interval undecided`.
        """
        if not self.holds:
            return FAILS
        if self.band.is_unbounded:
            return REPORTED
        return HOLDS if self.band.of != "mean" or self.is_decided else UNDECIDED

    @property
    def is_decided(self) -> bool:
        """Whether the interval of the mean lies in the band; without an interval it does not.

        Of a band with two bounds the interval of 90 %, which is the test of equivalence by two
        one-sided t tests at 5 % (TOST; Schuirmann 1987), else that of 95 %.
        """
        ends = _interval(self.values, 0.9 if self.band.is_two_sided else 0.95)
        return ends is not None and all(self.band.holds(end) for end in ends)

    @property
    def chances(self) -> tuple[float, float] | None:
        """The probabilities that the band holds for as many new seeds; see `gradsurg.stats`."""
        if self.lacking or self.band.is_unbounded or self.band.of == "dominating":
            return None
        if self.band.of == "total":
            if not all(value in (0, 1) for value in self.values):
                return None
            inside = [k for k in range(len(self.values) + 1) if self.band.holds(k)]
            return chances_of_count(round(sum(self.values)), len(self.values), inside)
        if len(self.values) < 2 or len(set(self.seeds)) < len(self.values):
            return None  # starts or settings, which are not draws
        low, high = self.band.low, self.band.high
        if not stdev(self.values):
            holds = float(self.band.holds(self.values[0]))
            return holds, holds
        chances = chances_of_mean if self.band.of == "mean" else chances_of_all
        return chances(self.values, low, high)

    @property
    def measured(self) -> str:
        """The value as text; of several runs the mean with its interval, total, or range."""
        if self.lacking:
            return self.lacking
        if self.band.of == "mean":
            text, ends = mean_with_interval(self.values), _interval(self.values, 0.9)
            if self.band.is_two_sided and ends is not None and ends[0] < ends[1]:
                return f"{text}; 90 % {ends[0]:.2g} to {ends[1]:.2g}"
            return text
        if self.band.of == "total":
            of = f" of {len(self.values)}" if self.band.metric in COUNTED else ""
            return f"{sum(self.values):.4g}{of}"
        if self.band.of == "dominating":
            text = f"{sum(self.values):g} of {len(self.values)}"
            return f"{text} ({', '.join(self.dominating)})" if self.dominating else text
        least, most = min(self.values), max(self.values)
        return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"

    @property
    def over_seeds(self) -> str:
        """Like `measured`, but for runs of several seeds their mean with its interval."""
        if self.band.of == "mean" and not self.lacking:
            return mean_with_interval(self.values)
        apart = len(set(self.seeds)) == len(self.values) > 1 and self.band.of == "every"
        apart = apart and min(self.values) < max(self.values)
        return mean_with_interval(self.values) if apart else self.measured


def mean_with_interval(values: Sequence[float]) -> str:
    """Format the mean with its 95 % t interval, which needs several values.

    Both have as many decimals as half the interval has in two significant digits, and enough to
    tell the sign of each end.
    """
    difference = paired_difference(values, [0.0] * len(values))
    low, high = difference.t_low, difference.t_high
    if low is None or high is None or low == high:
        return f"{difference.mean:.4g}"
    decimals = 1 - floor(log10((high - low) / 2))
    decimals = max(decimals, *(-floor(log10(abs(end))) for end in (low, high) if end))
    if decimals > MAX_DECIMALS:
        return f"{difference.mean:.4g} ({low:.2g} to {high:.2g})"
    mean, low, high = (
        f"{round(value, decimals) + 0.0:.{max(0, decimals)}f}"  # + 0.0: -0.0 reads as 0
        for value in (difference.mean, low, high)
    )
    return f"{mean} ({low} to {high})"


def _interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Return the t interval of the mean; None for fewer than three values."""
    difference = paired_difference(values, [0.0] * len(values), confidence)
    if difference.t_low is None or difference.t_high is None:
        return None
    return difference.t_low, difference.t_high


def judge(expected: Expected, studies: Studies) -> list[Judgement]:
    """Judge each band by the runs of its study; `studies` are keyed by their quick names."""
    return [_judge(band, studies[band.study or expected.quick[0]]) for band in expected.bands]


def verdict(results: Sequence[str], conditions: str) -> str:
    """Return the verdict on a claim, that of its weakest band."""
    for result in WEAKEST:
        if result in results:
            return result
    return CONDITIONS if conditions else HOLDS


def _judge(band: Band, study: "Study") -> Judgement:
    chosen = _selected(study.all_runs, band.runs)
    others = _selected(study.all_runs, band.minus) if band.minus else []
    if band.of == "dominating":
        chosen = [run for run in chosen if run not in others]
    if not chosen or (band.minus and not others):
        return Judgement(band, lacking="no run has these keys")
    if any(run in chosen for run in others):
        return Judgement(band, lacking="runs and minus are the same runs")
    if band.count not in (None, len(chosen)):
        return Judgement(band, lacking=f"{len(chosen)} runs, and the band is of {band.count}")
    needed = [*chosen, *others]
    # a diverged run has an outcome if the question is whether it diverged or reached a goal
    ended = ("finished", "diverged") if band.metric in COUNTED else ("finished",)
    if unfinished := [run for run in needed if run.state not in ended]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judgement(band, lacking=f"{len(unfinished)} of {len(needed)} runs: {states}")
    if band.of == "dominating":
        return _dominating(band, study, group(needed), others)
    outcomes = {run.name: outcome(study, run, band.metric, band.at) for run in needed}
    values = {name: value for name, value in outcomes.items() if value is not None}
    values = {name: value for name, value in values.items() if isfinite(value)}
    if missing := [name for name in outcomes if name not in values]:
        return Judgement(band, lacking=f"no {band.quantity} in {missing[0]}")
    if not others:
        return Judgement(band, tuple(values.values()), seeds=tuple(run.seed for run in chosen))
    seeds = {run.seed: values[run.name] for run in others}
    if len(seeds) < len(others) or sorted(seeds) != sorted(run.seed for run in chosen):
        return Judgement(band, lacking="runs and minus must be one run each of the same seeds")
    differences = {run.seed: values[run.name] - seeds[run.seed] for run in chosen}
    return Judgement(band, tuple(differences.values()), seeds=tuple(differences))


def _dominating(
    band: Band, study: "Study", arms: Sequence[Arm], others: Sequence[LoadedRun]
) -> Judgement:
    """Count the arms that dominate the front of those of `others`; see `Band`."""
    if len({tuple(run.seed for run in arm.runs) for arm in arms}) > 1:
        return Judgement(band, lacking="runs and minus must have the same seeds in every arm")
    names = terms(band.metric)
    columns: dict[str, list[list[float]]] = {}  # of an arm: for each term the value of each seed
    for arm in arms:
        values = [[outcome(study, run, name, band.at) for run in arm.runs] for name in names]
        known = [
            [value for value in row if value is not None and isfinite(value)] for row in values
        ]
        if any(len(row) < len(arm.runs) for row in known):
            return Judgement(band, lacking=f"no {band.quantity} in {arm.name}")
        columns[arm.name] = known
    rivals = [arm.name for arm in arms if arm.runs[0] in others]
    means = {name: [fmean(column) for column in columns[name]] for name in rivals}
    front = [
        name
        for name, own in means.items()
        if not any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for other in means.values()
        )
    ]
    judged = [arm.name for arm in arms if arm.name not in rivals]
    dominating = tuple(
        name for name in judged if any(_is_below(columns[name], columns[rival]) for rival in front)
    )
    return Judgement(band, tuple(float(name in dominating) for name in judged), "", (), dominating)


def _is_below(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Return whether the paired interval of every column lies below 0."""
    highs = [paired_difference(*pair).t_high for pair in zip(own, other, strict=True)]
    return all(high is not None and high < 0 for high in highs)


def _selected(runs: Sequence[LoadedRun], which: Mapping[str, object]) -> list[LoadedRun]:
    return [
        run
        for run in runs
        if is_selected(selectable_keys(run.config or {}, run.label, run.seed), which)
    ]


def selectable_keys(config: Mapping[str, Any], label: str, seed: int) -> dict[str, object]:
    """Return the keys by which a band can choose a run, with their values."""
    return {**flat(config), "label": label, "seed": seed}


def is_selected(keys: Mapping[str, object], which: Mapping[str, object]) -> bool:
    """Return whether a run with these keys is chosen by `which`."""
    return all(key in keys and keys[key] == value for key, value in which.items())


def outcome(study: "Study", run: LoadedRun, metric: str, at: str | int = "end") -> float | None:
    """Return an outcome of a run, or a sum or difference of outcomes; None if it is missing."""
    if metric == DIVERGED:
        return float(run.state == DIVERGED)
    if metric.startswith(EFFECT):
        values = _effect(study, run, metric)
        at = max(values, default=0) if at == "end" else at
    elif at == "end":
        return _combined(run.summary or {}, metric)
    else:
        import polars as pl

        rows = study.metrics.filter(pl.col("run").cast(pl.String) == run.name)
        rows = rows.select("step", *(name for name in terms(metric) if name in rows.columns))
        values = {row["step"]: _combined(row, metric) for row in rows.to_dicts()}
    if isinstance(at, int):
        return values.get(at)
    known = [value for value in values.values() if value is not None]
    return (max if at == "most" else min)(known, default=None)


def _effect(study: "Study", run: LoadedRun, path: str) -> dict[int, float | None]:
    """Return `effect/<transform>/<site>/<number>` by step."""
    import polars as pl

    _, transform, rest = path.split("/", 2)
    site, _, number = rest.rpartition("/")
    texts = pl.col("run", "transform", "site").cast(pl.String)
    rows = study.effects.with_columns(texts)
    rows = rows.filter(run=run.name, transform=transform, site=site)
    return dict(rows.select("step", number).iter_rows()) if number in rows.columns else {}


def terms(metric: str) -> list[str]:
    """Return the outcomes in a metric that is a sum or difference."""
    return [name.strip() for name in re.split(" [+-] ", metric)]


def _combined(numbers: Mapping[str, Any], metric: str) -> float | None:  # Any: JSON
    names, signs = terms(metric), ["+", *re.findall(" ([+-]) ", metric)]
    values = [value for name in names if isinstance(value := numbers.get(name), int | float)]
    if len(values) < len(names):
        return None
    return float(
        sum(-value if sign == "-" else value for value, sign in zip(values, signs, strict=True))
    )
