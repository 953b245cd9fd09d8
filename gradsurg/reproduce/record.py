"""The record of a reproduction, measured.json, and the tables that are written from it."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import gradsurg
from gradsurg.experiment.run_directory import UNTIL_REACHED, UNTIL_STEP
from gradsurg.report.arms import Arm
from gradsurg.report.load import LoadedRun
from gradsurg.reproduce.expected import Expected, Form
from gradsurg.reproduce.judge import (
    COUNTED,
    DIVERGED,
    EFFECT,
    HOLDS,
    REPORTED,
    UNMEASURED,
    Judgement,
    Studies,
    mean_with_interval,
    outcome,
    verdict,
)

if TYPE_CHECKING:
    from gradsurg.report.study import Study

Record = Mapping[str, Any]  # Any: what JSON can hold

STEPS = "steps"
FILE, FULL = "measured.json", "full.json"
FULL_COMMAND = "python scripts/reproduce.py {} --full"
BEGIN, END = "<!-- begin: written by scripts/reproduce.py -->", "<!-- end -->"
MAX_LISTED = 10
"""Seeds whose outcomes are listed; of more there is the range."""


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
            "band": item.band.bounds,
            "measured": item.measured,
            "over_seeds": item.over_seeds,
            "runs": len(item.values),
            "said": item.result,
            "again": item.chances and [round(chance, 4) for chance in item.chances],
        }
        for item in judgements
    ]
    places = [
        (run.summary or {}).get("hardware") for study in studies.values() for run in study.all_runs
    ]
    return {
        "form": form,
        "verdict": verdict([item.result for item in judgements], expected.conditions),
        "minutes": round(minutes, 1),
        "step_ms": {key: time and round(time, 3) for key, time in step_ms.items()},
        "hardware": "; ".join(dict.fromkeys(str(text) for text in places if text)),
        "versions": f"gradsurg {gradsurg.__version__}, Python {python_version()}",
        "bands": bands,
        "arms": [row for name in studies for row in _arm_rows(name, studies[name], expected)],
    }


def read_record(folder: Path) -> Record | None:
    """Read the record of an experiment's folder; None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_record(folder: Path, expected: Expected, record: Record, figure: Path | None) -> None:
    """Write the record, the tables of the README and the figure into an experiment's folder.

    Those of the full form are in files of their own.
    """
    if record["form"] == "full":
        text = f"# {folder.name}, full form\n\n```\n{FULL_COMMAND.format(folder.name)}\n```\n\n"
        if figure is not None:
            shutil.copyfile(figure, folder / f"full{figure.suffix}")
            text += f"![{folder.name}, full form](full{figure.suffix})\n\n"
        (folder / FULL).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / "full.md").write_text(f"{text}{tables(expected, record)}\n", encoding="utf-8")
        return
    (folder / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if figure is not None:
        shutil.copyfile(figure, folder / figure.name)
    write_tables(folder, expected, record)


def write_tables(folder: Path, expected: Expected, record: Record) -> None:
    """Write the tables of an experiment's README from its record, and its result where it opens."""
    write_between(folder / "README.md", tables(expected, record))
    if expected.opens:
        result = filled(expected.result, expected, record)
        write_between(folder.parents[1] / expected.opens, result)


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


def results(expected: Expected, record: Record) -> list[str]:
    """Return the result of each band; of one that the record lacks, `not measured`."""
    return [row["said"] for row in _band_rows(expected, record)]


def recorded_verdict(expected: Expected, record: Record | None) -> str:
    """Return the verdict of the bands as they stand now on the recorded numbers."""
    if record is None:
        return UNMEASURED
    return verdict(results(expected, record), expected.conditions)


def filled(text: str, expected: Expected, record: Record) -> str:
    """Replace each `{name}` in a text by the value of that band."""
    values = {row["name"]: row["over_seeds"] for row in _band_rows(expected, record)}
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], text)


def summary(expected: Expected, record: Record) -> str:
    """Return the sentence `front` with its numbers filled in, and how many bands hold."""
    stated = [result for result in results(expected, record) if result != REPORTED]
    held = f"{stated.count(HOLDS)} of {len(stated)} bands hold"
    text = filled(expected.front, expected, record)
    return f"{text}; {held}" if text else held


def chance_of_all(expected: Expected, record: Record) -> str:
    """Return the probability that all bands hold for as many new seeds, without and with the
    uncertainty of the measured means, deviations and shares; `-` if no band has one."""
    rows = [row for row in _band_rows(expected, record) if row["said"] != REPORTED]
    pairs = [row["again"] for row in rows if row.get("again")]
    if not pairs:
        return "-"
    low, high = map(_percent, sorted(prod(pair[side] for pair in pairs) for side in (0, 1)))
    text = high if high == low else f"{low} to {high}"
    return text if len(pairs) == len(rows) else f"{text} ({len(pairs)} of {len(rows)} bands)"


def _percent(share: float) -> str:
    return "> 99 %" if share > 0.99 else f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _band_rows(expected: Expected, record: Record) -> list[Mapping[str, Any]]:  # Any: JSON
    """Return the recorded row of each band; a band added or changed since is not measured."""
    recorded = {row["name"]: row for row in record["bands"]}
    missing = {"measured": "-", "over_seeds": UNMEASURED, "runs": 0}
    rows = []
    for band in expected.bands:
        row = recorded.get(band.name)
        if band.is_unbounded:
            row = {**(row or {**missing, "name": band.name, "measured": UNMEASURED})}
            row |= {"said": REPORTED, "again": None}
        elif row is None or row["band"] != band.bounds:
            row = {**missing, "name": band.name, "said": UNMEASURED}
        rows.append({**row, "says": band.says, "band": band.bounds})
    return rows


def tables(expected: Expected, record: Record) -> str:
    """Return the verdict with its conditions, the result in words, and the tables."""
    bands = [["band", "stated", "measured", "runs", "result"]]
    bands += [
        [row["says"], row["band"], row["measured"], str(row["runs"]), row["said"]]
        for row in _band_rows(expected, record)
    ]
    time = f"{record['minutes']:g} minutes of training, all runs together"
    conclusion = recorded_verdict(expected, record)
    parts = [f"Verdict of the {record['form']} form: **{conclusion}**."]
    if expected.conditions:
        parts.append(f"Conditions: {expected.conditions}.")
    chance = chance_of_all(expected, record)
    if chance != "-":
        parts.append(f"Probability that all bands hold for as many new seeds: {chance}.")
    head = " ".join(parts)
    caption = f"Measured on {place(record)}; {time}."
    texts = [head, filled(expected.result, expected, record), f"Bands. {caption}", markdown(bands)]
    texts += [f"Arms. {caption}", markdown(_arm_table(record["arms"]))]
    return "\n\n".join(text for text in texts if text)


def place(record: Record) -> str:
    """Return hardware and versions of a record."""
    versions = record.get("versions", "version of gradsurg not recorded")
    return ", ".join(text for text in (record["hardware"], versions) if text)


def _arm_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:  # Any: JSON
    table = [["study", "arm", "seeds", "outcome", "mean (95 % interval)", "each seed"]]
    for row in rows:
        cells = [str(row[key]) for key in ("study", "arm", "seeds", "metric", "mean")]
        table.append([*cells, row.get("each", "not recorded")])
    return table


def _arm_rows(name: str, study: "Study", expected: Expected) -> list[dict[str, object]]:
    """Return a row for each arm and each metric of the study's bands, or of all bands."""
    bands = [band for band in expected.bands if band.study in ("", name)] or expected.bands
    quantities = dict.fromkeys((band.quantity, band.metric, band.at) for band in bands)
    rows = []
    for arm in study.arms:
        for quantity, metric, at in quantities:
            row = _arm_row(study, arm, metric, at)
            if row is not None:
                rows.append({"study": name, "arm": arm.name, "metric": quantity, **row})
    return rows


def _arm_row(study: "Study", arm: Arm, metric: str, at: str | int) -> dict[str, object] | None:
    """Return the mean of an arm's outcome and that of each seed; None for another's effect."""
    ended = [run for run in arm.runs if run.state in ("finished", DIVERGED)]
    diverged = [run for run in ended if run.state == DIVERGED]
    counted = ended if metric in COUNTED else arm.whole
    outcomes = {run.name: outcome(study, run, metric, at) for run in counted}
    values = [value for value in outcomes.values() if value is not None]
    if metric.startswith(EFFECT) and not values:
        return None  # a transform that is not in this arm
    if metric in COUNTED:
        mean = f"{sum(values):g} of {len(values)}"
    elif not values:
        mean = ""
    elif metric == STEPS:  # a mean over runs that stopped early says little
        mean = f"{min(values):g} to {max(values):g}"
    else:
        mean = mean_with_interval(values)
    if diverged and metric != DIVERGED:
        share = f"diverged {len(diverged)}/{len(ended)}"
        mean = f"{mean}, {share}" if mean else share
    each = [_each(run, metric, outcomes.get(run.name)) for run in ended]
    if len(each) > MAX_LISTED and values:
        each = [f"{min(values):.4g} to {max(values):.4g}"]
    seeds = ", ".join(str(run.seed) for run in ended)
    return {"seeds": seeds, "mean": mean or "-", "each": ", ".join(each)}


def _each(run: LoadedRun, metric: str, value: float | None) -> str:
    if run.state == DIVERGED and metric != DIVERGED:
        return DIVERGED
    if metric == UNTIL_REACHED:
        step = (run.summary or {}).get(UNTIL_STEP)
        return f"{step:g}" if value and step is not None else "not reached"
    return "-" if value is None else f"{value:.4g}"
