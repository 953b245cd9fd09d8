"""The record of a reproduction, measured.json, and the tables that are written from it."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
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
    UNMEASURED,
    Judgement,
    Studies,
    Verdict,
    mean_with_interval,
    outcome,
    verdicts,
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
            "selects": item.band.selects,
            "values": item.values,
            "lacking": item.lacking,
        }
        for item in judgements
    ]
    places = [
        (run.summary or {}).get("hardware") for study in studies.values() for run in study.all_runs
    ]
    return {
        "form": form,
        "minutes": round(minutes, 1),
        "step_ms": {key: time and round(time, 3) for key, time in step_ms.items()},
        "hardware": "; ".join(dict.fromkeys(str(text) for text in places if text)),
        "versions": f"gradsurg {gradsurg.__version__}, Python {python_version()}",
        "bands": bands,
        "arms": [row for name in studies for row in _arm_rows(name, studies[name], expected)],
    }


def read_record(folder: Path, form: Form = "quick") -> Record | None:
    """Read the record of an experiment's folder; None if there is none."""
    path = folder / (FULL if form == "full" else FILE)
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
    """Write the tables of an experiment's README from its record."""
    write_between(folder / "README.md", tables(expected, record))


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


def recorded(expected: Expected, record: Record | None) -> list[Verdict]:
    """Judge the recorded values anew; a band whose runs or metric have changed is not measured."""
    rows = {row["name"]: row for row in record["bands"]} if record else {}
    judgements = []
    for band in expected.bands:
        row = rows.get(band.name, {})
        if row.get("selects") == json.loads(json.dumps(band.selects)):
            judgements.append(Judgement(band, tuple(row["values"]), row["lacking"]))
        else:
            judgements.append(Judgement(band, lacking=UNMEASURED))
    return verdicts(expected, judgements)


def filled(text: str, found: Sequence[Verdict]) -> str:
    """Replace each `{name}` in a text by the value of that band."""
    values = {item.band.name: item.measured for each in found for item in each.judgements}
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], text)


def band_rows(found: Sequence[Verdict]) -> list[list[str]]:
    """Return the table of all bands; the first row is its head."""
    rows = [["claim", "band", "stated", "measured", "runs", "result"]]
    for verdict in found:
        for item in verdict.judgements:
            p = "" if item.p_value is None else f"; p {item.p_value:.2g}"
            cells = [item.band.says, item.band.bounds, item.measured + p, str(len(item.values))]
            rows.append([verdict.name, *cells, item.result])
    return rows


def conclusion(verdict: Verdict) -> str:
    """Return a claim's verdict in a sentence, with its reason or conditions."""
    claim = verdict.claim
    held = sum(item.result == HOLDS for item in verdict.judged)
    text = f"**{verdict.result}**"
    if verdict.judged and not claim.not_tested:
        text += f" ({held} of {len(verdict.judged)} bands hold)"
    if claim.not_tested:
        text += f": {claim.not_tested}"
    if claim.conditions:
        text += f". Conditions: {claim.conditions}"
    if verdict.again != "-":
        text += f". Probability of this verdict for as many new seeds: {verdict.again}"
    return f"{text}."


def tables(expected: Expected, record: Record) -> str:
    """Return the verdict on each claim with its conditions, the result in words, and the tables."""
    found = recorded(expected, record)
    time = f"{record['minutes']:g} minutes of training, all runs together"
    lines = [f"- `{each.name}`: {each.claim.says} {conclusion(each)}" for each in found]
    caption = f"Measured on {place(record)}; {time}."
    texts = [f"Verdicts of the {record['form']} form:", "\n".join(lines)]
    texts += [filled(expected.result, found), f"Bands. {caption}", markdown(band_rows(found))]
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
    bands = [
        b for b in expected.bands if name in (b.study, b.minus_study) or not b.study
    ] or expected.bands
    quantities = dict.fromkeys((band.quantity, band.metric, band.at) for band in bands)
    rows = []
    for arm in study.arms:
        for quantity, metric, at in quantities:
            row = _arm_row(study, arm, metric, at)
            if row is not None:
                rows.append({"study": name, "arm": arm.name, "metric": quantity, **row})
    return rows


def _arm_row(study: "Study", arm: Arm, metric: str, at: str | int) -> dict[str, object] | None:
    """Return an arm's outcome, its mean and each seed's; None for another arm's effect."""
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
