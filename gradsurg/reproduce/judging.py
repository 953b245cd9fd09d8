"""Whether what was measured lies in the bands."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import fmean
from typing import Any

from gradsurg.report.load import Found, flat
from gradsurg.reproduce.expected import Band, Expected
from gradsurg.stats import paired_difference
from gradsurg.training.run_directory import EFFECTS, METRICS, UNTIL_REACHED, RunDirectory

Studies = Mapping[str, Sequence[Found]]

EFFECT = "effect/"
HOLDS, CONDITIONS, FAILS = "holds", "holds under conditions", "does not hold"
TOLD = "told"
MOST_PLACES = 6  # behind the point


@dataclass(frozen=True)
class Judged:
    """One band and the values of its runs; `lacking` says why it could not be judged."""

    band: Band
    values: tuple[float, ...] = ()
    lacking: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def holds(self) -> bool:
        if self.lacking or not self.values:
            return False
        if self.band.of == "mean":
            return self.band.holds(fmean(self.values))
        if self.band.of == "total":
            return self.band.holds(sum(self.values))
        return all(self.band.holds(value) for value in self.values)

    @property
    def said(self) -> str:
        """`holds`, `does not hold`, or `told` where nothing is held against it."""
        if not self.holds:
            return FAILS
        return TOLD if self.band.is_told else HOLDS

    @property
    def measured(self) -> str:
        """The value; of some the mean with its interval, or from the least to the greatest."""
        if self.lacking:
            return self.lacking
        if self.band.of == "mean":
            return said_mean(self.values)
        if self.band.of == "total":
            of = f" of {len(self.values)}" if self.band.metric == UNTIL_REACHED else ""
            return f"{sum(self.values):.4g}{of}"
        least, most = min(self.values), max(self.values)
        return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"

    @property
    def over_seeds(self) -> str:
        """As `measured`; of runs with a seed each their mean with its interval."""
        apart = len(set(self.seeds)) == len(self.values) > 1 and self.band.of == "every"
        apart = apart and min(self.values) < max(self.values)
        return said_mean(self.values) if apart else self.measured


def said_mean(values: Sequence[float]) -> str:
    """The mean with its 95 % t interval, if there are several values: as many digits of both as
    tell the half of the interval to two, and on which side of 0 its ends are.
    """
    found = paired_difference(values, [0.0] * len(values))
    if found.low is None or found.high is None or found.low == found.high:
        return f"{found.mean:.4g}"
    places = 1 - floor(log10((found.high - found.low) / 2))
    ends = [abs(end) for end in (found.low, found.high) if end]
    places = max(places, *(-floor(log10(end)) for end in ends))
    if places > MOST_PLACES:
        return f"{found.mean:.4g} ({found.low:.2g} to {found.high:.2g})"
    mean, low, high = (
        f"{round(value, places) + 0.0:.{max(0, places)}f}"  # + 0.0: -0.0 reads as 0
        for value in (found.mean, found.low, found.high)
    )
    return f"{mean} ({low} to {high})"


def judge(expected: Expected, studies: Studies) -> list[Judged]:
    """Each band with what the runs of its study came to; `studies` by their quick names."""
    return [_judged(band, studies[band.study or expected.quick[0]]) for band in expected.bands]


def verdict(expected: Expected, judged: Sequence[Judged]) -> str:
    """What the bands together say about the claim."""
    if not all(one.holds for one in judged):
        return FAILS
    return CONDITIONS if expected.conditions else HOLDS


def outcome(run: Found, metric: str, at: str | int = "end") -> float | None:
    """An outcome of a run, or a sum or difference of some; None if the run has not got it."""
    if metric.startswith(EFFECT):
        values = effect(run, metric)
        at = max(values, default=0) if at == "end" else at
    elif at == "end":
        return _sum(run.summary or {}, metric)
    else:
        rows = RunDirectory(run.path).read_rows(METRICS)
        values = {row["step"]: _sum(row, metric) for row in rows}
    if isinstance(at, int):
        return values.get(at)
    known = [value for value in values.values() if value is not None]
    return (max if at == "most" else min)(known, default=None)


def effect(run: Found, path: str) -> dict[int, float | None]:
    """What `effect/<transform>/<site>/<number>` was over the steps, as effects.jsonl has it."""
    _, transform, rest = path.split("/", 2)
    site, _, number = rest.rpartition("/")
    return {
        row["step"]: row.get(number)
        for row in RunDirectory(run.path).read_rows(EFFECTS)
        if (row["transform"], row["site"]) == (transform, site)
    }


def names_in(metric: str) -> list[str]:
    """The outcomes that a metric is the sum or the difference of."""
    return [name.strip() for name in re.split(" [+-] ", metric)]


def _sum(numbers: Mapping[str, Any], metric: str) -> float | None:  # Any: what JSON can hold
    names, signs = names_in(metric), ["+", *re.findall(" ([+-]) ", metric)]
    found = [part for name in names if isinstance(part := numbers.get(name), int | float)]
    if len(found) < len(names):
        return None
    return float(sum(-one if sign == "-" else one for one, sign in zip(found, signs, strict=True)))


def _judged(band: Band, runs: Sequence[Found]) -> Judged:
    chosen = _meant(runs, band.runs)
    others = _meant(runs, band.minus) if band.minus else []
    if not chosen or (band.minus and not others):
        return Judged(band, lacking="no run is meant")
    if any(run in chosen for run in others):
        return Judged(band, lacking="runs and minus mean the same runs")
    if band.count not in (None, len(chosen)):
        return Judged(band, lacking=f"{len(chosen)} runs, and the band is of {band.count}")
    asked = [*chosen, *others]
    # one that diverged has an outcome if the question is whether it has got somewhere
    ended = ("finished", "diverged") if band.metric == UNTIL_REACHED else ("finished",)
    if unfinished := [run for run in asked if run.state not in ended]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judged(band, lacking=f"{len(unfinished)} of {len(asked)} runs: {states}")
    values = {run.name: outcome(run, band.metric, band.at) for run in asked}
    told = {name: value for name, value in values.items() if value is not None and isfinite(value)}
    if lacking := [name for name in values if name not in told]:
        return Judged(band, lacking=f"no {band.quantity} in {lacking[0]}")
    if not others:
        return Judged(band, tuple(told.values()), seeds=tuple(run.seed for run in chosen))
    seeds = {run.seed: told[run.name] for run in others}
    if len(seeds) < len(others) or sorted(seeds) != sorted(run.seed for run in chosen):
        return Judged(band, lacking="runs and minus must be one run each of the same seeds")
    left = {run.seed: told[run.name] - seeds[run.seed] for run in chosen}
    return Judged(band, tuple(left.values()), seeds=tuple(left))


def _meant(runs: Sequence[Found], which: Mapping[str, object]) -> list[Found]:
    return [run for run in runs if is_meant(known_of(run.config or {}, run.label, run.seed), which)]


def known_of(config: Mapping[str, Any], label: str, seed: int) -> dict[str, object]:
    """What a band can choose a run by."""
    return {**flat(config), "label": label, "seed": seed}


def is_meant(known: Mapping[str, object], which: Mapping[str, object]) -> bool:
    """Whether a run is among those that a band is about."""
    return all(key in known and known[key] == value for key, value in which.items())
