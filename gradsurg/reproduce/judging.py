"""Whether what was measured lies in the bands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from gradsurg.report.grouping import flat
from gradsurg.report.reading import Found
from gradsurg.reproduce.expected import Band, Expected
from gradsurg.runs.store import METRICS, RunDirectory
from gradsurg.stats import t_reach

Studies = Mapping[str, Sequence[Found]]

HOLDS, CONDITIONS, FAILS = "holds", "holds under conditions", "does not hold"


@dataclass(frozen=True)
class Judged:
    """One band and the values of its runs; `lacking` says why it could not be judged."""

    band: Band
    values: tuple[float, ...] = ()
    lacking: str = ""

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
    def measured(self) -> str:
        """The value; of some the mean with its interval, or from the least to the greatest."""
        if self.lacking:
            return self.lacking
        if self.band.of == "mean":
            return said_mean(self.values)
        if self.band.of == "total":
            return f"{sum(self.values):.4g}"
        least, most = min(self.values), max(self.values)
        return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def said_mean(values: Sequence[float]) -> str:
    """The mean with its 95 % t interval, if there are several values."""
    mean = fmean(values)
    if len(values) == 1:
        return f"{mean:.4g}"
    reach = t_reach(len(values)) * stdev(values) / sqrt(len(values))
    return f"{mean:.4g} ({mean - reach:.4g} to {mean + reach:.4g})"


def judge(expected: Expected, studies: Studies) -> list[Judged]:
    """Each band with what the runs of its study came to; `studies` by their quick names."""
    return [_judged(band, studies[band.study or expected.quick[0]]) for band in expected.bands]


def verdict(expected: Expected, judged: Sequence[Judged]) -> str:
    """What the bands together say about the claim."""
    if not all(one.holds for one in judged):
        return FAILS
    return CONDITIONS if expected.conditions else HOLDS


def outcome(run: Found, metric: str, at: str | int = "end") -> float | None:
    """An outcome of a run, or the sum of some; None if the run has not got it."""
    if at == "end":
        return _sum(run.summary or {}, metric)
    values = {row["step"]: _sum(row, metric) for row in RunDirectory(run.path).read_rows(METRICS)}
    if isinstance(at, int):
        return values.get(at)
    known = [value for value in values.values() if value is not None]
    return (max if at == "most" else min)(known, default=None)


def _sum(numbers: Mapping[str, Any], metric: str) -> float | None:  # Any: what JSON can hold
    parts = [numbers.get(part.strip()) for part in metric.split(" + ")]
    found = [part for part in parts if isinstance(part, int | float)]
    return float(sum(found)) if len(found) == len(parts) else None


def _judged(band: Band, runs: Sequence[Found]) -> Judged:
    chosen = _meant(runs, band.runs)
    others = _meant(runs, band.minus) if band.minus else []
    if not chosen or (band.minus and not others):
        return Judged(band, lacking="no run is meant")
    asked = [*chosen, *others]
    if unfinished := [run for run in asked if run.state != "finished"]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judged(band, lacking=f"{len(unfinished)} of {len(asked)} runs: {states}")
    values = {run.name: outcome(run, band.metric, band.at) for run in asked}
    told = {name: value for name, value in values.items() if value is not None and isfinite(value)}
    if lacking := [name for name in values if name not in told]:
        return Judged(band, lacking=f"no {band.quantity} in {lacking[0]}")
    if not others:
        return Judged(band, tuple(told.values()))
    seeds = {run.seed: told[run.name] for run in others}
    if len(seeds) < len(others) or sorted(seeds) != sorted(run.seed for run in chosen):
        return Judged(band, lacking="runs and minus must be one run each of the same seeds")
    return Judged(band, tuple(told[run.name] - seeds[run.seed] for run in chosen))


def _meant(runs: Sequence[Found], which: Mapping[str, object]) -> list[Found]:
    return [run for run in runs if _is_meant(run, which)]


def _is_meant(run: Found, which: Mapping[str, object]) -> bool:
    known = {**flat(run.config or {}), "label": run.label, "seed": run.seed}
    return all(key in known and known[key] == value for key, value in which.items())
