"""Judge the bands of a claim by its runs, and record the result for tables."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsurg.report.load import LoadedRun, flat, group
from gradsurg.reproduce.expected import Band, Expected, Form
from gradsurg.stats import paired_difference
from gradsurg.training.run_directory import EFFECTS, METRICS, UNTIL_REACHED, RunDirectory

Studies = Mapping[str, Sequence[LoadedRun]]
Record = Mapping[str, Any]  # Any: what JSON can hold

EFFECT = "effect/"
STEPS = "steps"
HOLDS, CONDITIONS, FAILS = "holds", "holds under conditions", "does not hold"
REPORTED = "reported"
MAX_DECIMALS = 6

FILE = "measured.json"
BEGIN, END = "<!-- begin: written by scripts/reproduce.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Judgement:
    """A band and the values of its runs; `lacking` says why it could not be judged."""

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
    def result(self) -> str:
        """`holds`, `does not hold`, or `reported` for a band without bounds."""
        if not self.holds:
            return FAILS
        return REPORTED if self.band.is_unbounded else HOLDS

    @property
    def measured(self) -> str:
        """The value as text; of several runs the mean with its interval, total, or range."""
        if self.lacking:
            return self.lacking
        if self.band.of == "mean":
            return mean_with_interval(self.values)
        if self.band.of == "total":
            of = f" of {len(self.values)}" if self.band.metric == UNTIL_REACHED else ""
            return f"{sum(self.values):.4g}{of}"
        least, most = min(self.values), max(self.values)
        return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"

    @property
    def over_seeds(self) -> str:
        """Like `measured`, but for runs of several seeds their mean with its interval."""
        apart = len(set(self.seeds)) == len(self.values) > 1 and self.band.of == "every"
        apart = apart and min(self.values) < max(self.values)
        return mean_with_interval(self.values) if apart else self.measured


def mean_with_interval(values: Sequence[float]) -> str:
    """Format the mean with its 95 % t interval, which needs several values.

    Both have as many decimals as half the interval has in two significant digits, and enough to
    tell the sign of each end.
    """
    difference = paired_difference(values, [0.0] * len(values))
    low, high = difference.low, difference.high
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


def judge(expected: Expected, studies: Studies) -> list[Judgement]:
    """Judge each band by the runs of its study; `studies` are keyed by their quick names."""
    return [_judge(band, studies[band.study or expected.quick[0]]) for band in expected.bands]


def verdict(expected: Expected, judgements: Sequence[Judgement]) -> str:
    """Return the verdict of all bands on the claim."""
    if not all(item.holds for item in judgements):
        return FAILS
    return CONDITIONS if expected.conditions else HOLDS


def _judge(band: Band, runs: Sequence[LoadedRun]) -> Judgement:
    chosen = _selected(runs, band.runs)
    others = _selected(runs, band.minus) if band.minus else []
    if not chosen or (band.minus and not others):
        return Judgement(band, lacking="no run has these keys")
    if any(run in chosen for run in others):
        return Judgement(band, lacking="runs and minus are the same runs")
    if band.count not in (None, len(chosen)):
        return Judgement(band, lacking=f"{len(chosen)} runs, and the band is of {band.count}")
    needed = [*chosen, *others]
    # a diverged run has an outcome if the question is whether it reached a goal
    ended = ("finished", "diverged") if band.metric == UNTIL_REACHED else ("finished",)
    if unfinished := [run for run in needed if run.state not in ended]:
        states = ", ".join(dict.fromkeys(run.state for run in unfinished))
        return Judgement(band, lacking=f"{len(unfinished)} of {len(needed)} runs: {states}")
    outcomes = {run.name: outcome(run, band.metric, band.at) for run in needed}
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


def outcome(run: LoadedRun, metric: str, at: str | int = "end") -> float | None:
    """Return an outcome of a run, or a sum or difference of outcomes; None if it is missing."""
    if metric.startswith(EFFECT):
        values = effect(run, metric)
        at = max(values, default=0) if at == "end" else at
    elif at == "end":
        return _combined(run.summary or {}, metric)
    else:
        rows = RunDirectory(run.path).read_rows(METRICS)
        values = {row["step"]: _combined(row, metric) for row in rows}
    if isinstance(at, int):
        return values.get(at)
    known = [value for value in values.values() if value is not None]
    return (max if at == "most" else min)(known, default=None)


def effect(run: LoadedRun, path: str) -> dict[int, float | None]:
    """Return `effect/<transform>/<site>/<number>` by step, from effects.jsonl."""
    _, transform, rest = path.split("/", 2)
    site, _, number = rest.rpartition("/")
    return {
        row["step"]: row.get(number)
        for row in RunDirectory(run.path).read_rows(EFFECTS)
        if (row["transform"], row["site"]) == (transform, site)
    }


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


# The record -----------------------------------------------------------------------------------


def make_record(
    expected: Expected,
    form: Form,
    judgements: Sequence[Judgement],
    studies: Studies,
    minutes: float,
    step_ms: Mapping[str, float | None],
) -> Record:
    """Return the content of measured.json, from which all tables are made."""
    bands = [
        {
            "name": item.band.name,
            "says": item.band.says,
            "band": item.band.bounds,
            "measured": item.measured,
            "over_seeds": item.over_seeds,
            "runs": len(item.values),
            "said": item.result,
        }
        for item in judgements
    ]
    hardware = [(run.summary or {}).get("hardware") for runs in studies.values() for run in runs]
    return {
        "form": form,
        "verdict": verdict(expected, judgements),
        "minutes": round(minutes, 1),
        "step_ms": {key: time and round(time, 3) for key, time in step_ms.items()},
        "hardware": next((text for text in hardware if text), None),
        "bands": bands,
        "arms": [row for name in studies for row in _arm_rows(name, studies[name], expected)],
    }


def read_record(folder: Path) -> Record | None:
    """Read the record of an experiment's folder; None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_record(folder: Path, record: Record, figure: Path | None) -> None:
    """Write the record, the tables of the README and the figure into an experiment's folder."""
    (folder / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if figure is not None:
        shutil.copyfile(figure, folder / figure.name)
    write_between(folder / "README.md", _tables(record))


def write_between(path: Path, text: str) -> None:
    """Replace the text between a file's markers, which are appended if it has none."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in before:
        before = f"{before.rstrip()}\n\n{BEGIN}\n{END}\n".lstrip()
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _tables(record: Record) -> str:
    bands = [["band", "stated", "measured", "runs", ""]]
    bands += [
        [row["says"], row["band"], row["measured"], str(row["runs"]), row["said"]]
        for row in record["bands"]
    ]
    arms = [["study", "arm", "seeds", "outcome", "mean (95 % interval)"]]
    arms += [[str(cell) for cell in row.values()] for row in record["arms"]]
    time = f"{record['minutes']:g} minutes of training, all runs together"
    head = f"Verdict of the {record['form']} form: **{record['verdict']}** ({time})."
    return "\n\n".join([head, markdown(bands), markdown(arms)])


def _arm_rows(study: str, runs: Sequence[LoadedRun], expected: Expected) -> list[dict[str, object]]:
    """Return a row for each arm and each metric of the study's bands, or of all bands."""
    bands = [band for band in expected.bands if band.study in ("", study)] or expected.bands
    rows = []
    for arm in group(runs):
        for quantity, metric, at in dict.fromkeys((b.quantity, b.metric, b.at) for b in bands):
            outcomes = [outcome(run, metric, at) for run in arm.whole]
            values = [value for value in outcomes if value is not None]
            if metric.startswith(EFFECT) and not values:
                continue  # a transform that is not in this arm
            seeds = ", ".join(str(run.seed) for run in arm.whole)
            mean = mean_with_interval(values) if values else "-"
            if values and metric == UNTIL_REACHED:
                mean = f"{sum(values):g} of {len(values)}"
            elif values and metric == STEPS:  # a mean over runs that stopped early says little
                mean = f"{min(values):g} to {max(values):g}"
            rows.append(
                {"study": study, "arm": arm.name, "seeds": seeds, "metric": quantity, "mean": mean}
            )
    return rows
