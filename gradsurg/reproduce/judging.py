"""Whether what was measured lies in the bands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, stdev

from gradsurg.report.grouping import flat
from gradsurg.report.reading import Found
from gradsurg.reproduce.expected import Band, Expected
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
        return all(self.band.holds(value) for value in self.values)

    @property
    def measured(self) -> str:
        """The value; of some the mean with its interval, or from the least to the greatest."""
        if self.lacking:
            return self.lacking
        if self.band.of == "mean":
            return said_mean(self.values)
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


def outcome(run: Found, metric: str) -> float | None:
    """An outcome of a run, or the sum of some; None if the run has not got it."""
    summary = run.summary or {}
    parts = [summary.get(part.strip()) for part in metric.split(" + ")]
    numbers = [part for part in parts if isinstance(part, int | float)]
    return float(sum(numbers)) if len(numbers) == len(parts) else None


def _judged(band: Band, runs: Sequence[Found]) -> Judged:
    chosen = [run for run in runs if _is_meant(run, band)]
    if not chosen:
        return Judged(band, lacking="no run is meant")
    if unfinished := [run for run in chosen if run.state != "finished"]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judged(band, lacking=f"{len(unfinished)} of {len(chosen)} runs: {states}")
    values = [outcome(run, band.metric) for run in chosen]
    told = tuple(value for value in values if value is not None and isfinite(value))
    if len(told) < len(values):
        return Judged(band, lacking=f"no {band.metric} in {chosen[0].name}")
    return Judged(band, told)


def _is_meant(run: Found, band: Band) -> bool:
    known = {**flat(run.config or {}), "label": run.label, "seed": run.seed}
    return all(key in known and known[key] == value for key, value in band.runs.items())
