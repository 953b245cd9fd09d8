"""Judge the bands of a claim by its runs, and a claim by its bands."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, isfinite, log10, prod
from typing import TYPE_CHECKING, Any

from gradsurg.experiment.run_directory import UNTIL_REACHED
from gradsurg.report.arms import flat
from gradsurg.report.load import LoadedRun
from gradsurg.reproduce.expected import Band, Claim, Expected
from gradsurg.stats import (
    chances_of_count,
    chances_of_interval,
    paired_difference,
    share_interval,
)

if TYPE_CHECKING:
    from gradsurg.report.study import Study

Studies = Mapping[str, "Study"]
Ends = tuple[float, float]

EFFECT = "effect/"
DIVERGED = "diverged"
HOLDS, FAILS, UNDECIDED, NOT_TESTED = "holds", "does not hold", "undecided", "not tested"
UNMEASURED, REPORTED = "not measured", "reported"
COUNTED = (UNTIL_REACHED, DIVERGED)
"""Outcomes that a diverged run has."""
MAX_DECIMALS = 6


@dataclass(frozen=True)
class Judgement:
    """A band and the values of its runs; `lacking` says why it could not be judged."""

    band: Band
    values: tuple[float, ...] = ()
    lacking: str = ""

    @cached_property
    def interval(self) -> Ends | None:
        """The range that decides: the 95 % interval over seeds, or of every run; None if too few.

        Of a mean it inverts the sign-flip test, of a share it is that of Clopper and Pearson.
        """
        if self.band.of == "every":
            return min(self.values), max(self.values)
        if self.band.of == "share":
            return share_interval(round(sum(self.values)), len(self.values))
        return paired_difference(self.values, [0.0] * len(self.values)).interval

    @property
    def result(self) -> str:
        """The band's verdict, `reported` for a band without bounds, or `not measured`."""
        if self.lacking:
            return UNMEASURED
        return REPORTED if self.band.is_unbounded else _relation(self.band, self.interval)

    @property
    def chances(self) -> Mapping[str, tuple[float, float]] | None:
        """The probability of each verdict for as many new seeds; None for runs that are not drawn.

        Each is a pair, without and with the uncertainty of the measured mean, deviation or share.
        """
        band, n = self.band, len(self.values)
        if self.lacking or band.is_unbounded or band.of == "every" or self.interval is None:
            return None
        if band.of == "share":
            by_verdict: dict[str, list[int]] = {}
            for count in range(n + 1):
                relation = _relation(band, share_interval(count, n))
                by_verdict.setdefault(relation, []).append(count)
            found = round(sum(self.values))
            chances = {
                verdict: chances_of_count(found, n, counts)
                for verdict, counts in by_verdict.items()
            }
        elif min(self.values) == max(self.values):
            chances = {self.result: (1.0, 1.0)}
        else:
            inside, outside = chances_of_interval(self.values, band.low, band.high)
            rest = (1 - inside[0] - outside[0], 1 - inside[1] - outside[1])
            chances = {HOLDS: inside, FAILS: outside, UNDECIDED: rest}
        return {each: chances.get(each, (0.0, 0.0)) for each in (HOLDS, FAILS, UNDECIDED)}

    @property
    def measured(self) -> str:
        """The value as text: a mean or share with its interval, and of a difference its p-value."""
        if self.lacking:
            return self.lacking
        if self.band.of == "share":
            low, high = (100 * x for x in share_interval(round(sum(self.values)), len(self.values)))
            return f"{sum(self.values):g} of {len(self.values)} ({low:.0f} % to {high:.0f} %)"
        if self.band.of == "mean":
            return mean_with_interval(self.values)
        least, most = min(self.values), max(self.values)
        return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"

    @property
    def p_value(self) -> float | None:
        """The sign-flip p-value of a mean difference of zero; None for other bands."""
        if self.lacking or not self.band.is_difference or self.band.of != "mean":
            return None
        return paired_difference(self.values, [0.0] * len(self.values)).p_value


def _relation(band: Band, interval: Ends | None) -> str:
    """Return the verdict of an interval: within the band, outside, or neither."""
    if interval is None:
        return UNDECIDED
    low, high = interval
    # An interval of differences of counts can end at 0 with p = 1: no evidence of a sign.
    open_ended = band.of == "mean" and band.is_difference and band.low != band.high
    touches = open_ended and (low == band.low or high == band.high)
    if band.holds(low) and band.holds(high) and not touches:
        return HOLDS
    above = band.high is not None and low > band.high
    below = band.low is not None and high < band.low
    return FAILS if above or below or band.of == "every" else UNDECIDED


def mean_with_interval(values: Sequence[float]) -> str:
    """Format the mean with its 95 % interval, which needs six values.

    Both have as many decimals as half the interval has in two significant digits, and enough to
    tell the sign of each end.
    """
    difference = paired_difference(values, [0.0] * len(values))
    if difference.interval is None or difference.interval[0] == difference.interval[1]:
        return f"{difference.mean:.4g}"
    low, high = difference.interval
    decimals = 1 - floor(log10((high - low) / 2))
    decimals = max(decimals, *(-floor(log10(abs(end))) for end in (low, high) if end))
    if decimals > MAX_DECIMALS:
        return f"{difference.mean:.4g} ({low:.2g} to {high:.2g})"
    mean, low, high = (
        f"{round(value, decimals) + 0.0:.{max(0, decimals)}f}"  # + 0.0: -0.0 reads as 0
        for value in (difference.mean, low, high)
    )
    return f"{mean} ({low} to {high})"


@dataclass(frozen=True)
class Verdict:
    """A claim and the judgements of its bands."""

    name: str
    claim: Claim
    judgements: tuple[Judgement, ...]

    @property
    def judged(self) -> list[Judgement]:
        """The judgements that decide."""
        return [each for each in self.judgements if not each.band.is_unbounded]

    @property
    def result(self) -> str:
        """The verdict of the weakest band, or `not tested`."""
        if self.claim.not_tested:
            return NOT_TESTED
        results = [each.result for each in self.judged]
        return next((each for each in (FAILS, UNMEASURED, UNDECIDED) if each in results), HOLDS)

    @property
    def again(self) -> str:
        """The probability of this verdict for as many new seeds, its bands taken as independent.

        The two numbers are without and with the uncertainty of the measurement; `-` if no band has
        `chances`. A band without them keeps its result.
        """
        found = [(each, each.chances) for each in self.judged]
        drawn = [chances for _, chances in found if chances is not None]
        if self.result in (NOT_TESTED, UNMEASURED) or not drawn:
            return "-"
        none = dict.fromkeys((HOLDS, FAILS, UNDECIDED), (0.0, 0.0))
        certain = [none | {each.result: (1.0, 1.0)} for each, chances in found if chances is None]
        by_side = []
        for side in (0, 1):
            all_hold = prod(chances[HOLDS][side] for chances in (*drawn, *certain))
            none_fails = prod(1 - chances[FAILS][side] for chances in (*drawn, *certain))
            of_result = {HOLDS: all_hold, FAILS: 1 - none_fails, UNDECIDED: none_fails - all_hold}
            by_side.append(of_result[self.result])
        low, high = map(_percent, sorted(by_side))
        text = high if high == low else f"{low} to {high}"
        of = f" ({len(drawn)} of {len(self.judged)} bands)"
        return text if len(drawn) == len(self.judged) else text + of


def _percent(share: float) -> str:
    return "> 99 %" if share > 0.99 else f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def verdicts(expected: Expected, judgements: Iterable[Judgement]) -> list[Verdict]:
    """Return the verdict on each claim."""
    judgements = list(judgements)
    return [
        Verdict(name, claim, tuple(j for j in judgements if expected.claim_of(j.band) == name))
        for name, claim in expected.claims.items()
    ]


def judge(expected: Expected, studies: Studies) -> list[Judgement]:
    """Judge each band by the runs of its study; `studies` are keyed by their quick names."""
    return [_judge(band, studies, band.study or expected.quick[0]) for band in expected.bands]


def _judge(band: Band, studies: Studies, name: str) -> Judgement:
    study, other = studies[name], studies[band.minus_study or name]
    chosen = _selected(study.all_runs, band.runs)
    others = _selected(other.all_runs, band.minus) if band.is_difference else []
    if not chosen or (band.is_difference and not others):
        return Judgement(band, lacking="no run has these keys")
    if any(run in chosen for run in others):
        return Judgement(band, lacking="runs and minus are the same runs")
    needed = [*((study, run) for run in chosen), *((other, run) for run in others)]
    # a diverged run has an outcome if the question is whether it diverged or reached a goal
    ended = ("finished", "diverged") if band.metric in COUNTED else ("finished",)
    if unfinished := [run for _, run in needed if run.state not in ended]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judgement(band, lacking=f"{len(unfinished)} of {len(needed)} runs: {states}")
    outcomes = {run.path: outcome(own, run, band.metric, band.at) for own, run in needed}
    values = {path: value for path, value in outcomes.items() if value is not None}
    values = {path: value for path, value in values.items() if isfinite(value)}
    if missing := [path.name for path in outcomes if path not in values]:
        return Judgement(band, lacking=f"no {band.quantity} in {missing[0]}")
    if band.of == "share" and not {*values.values()} <= {0.0, 1.0}:
        return Judgement(band, lacking=f"{band.quantity} is not 0 or 1 in each run")
    if not others:
        return Judgement(band, tuple(values.values()))
    seeds = {run.seed: values[run.path] for run in others}
    if len(seeds) < len(others) or sorted(seeds) != sorted(run.seed for run in chosen):
        return Judgement(band, lacking="runs and minus must be one run each of the same seeds")
    return Judgement(band, tuple(values[run.path] - seeds[run.seed] for run in chosen))


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
