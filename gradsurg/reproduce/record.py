"""What was measured, kept beside the claim for tables that nobody types."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsurg.report.load import Found, group
from gradsurg.reproduce.expected import Expected, Form
from gradsurg.reproduce.judging import EFFECT, Judged, Studies, outcome, said_mean, verdict
from gradsurg.training.run_directory import UNTIL_REACHED

FILE = "measured.json"
BEGIN, END = "<!-- begin: written by scripts/reproduce.py -->", "<!-- end -->"
STEPS = "steps"
Record = Mapping[str, Any]  # Any: what JSON can hold


def record_of(
    expected: Expected,
    form: Form,
    judged: Sequence[Judged],
    studies: Studies,
    minutes: float,
    step_ms: Mapping[str, float | None],
) -> Record:
    """All that the tables tell."""
    bands = [
        {
            "name": one.band.name,
            "says": one.band.says,
            "band": one.band.bounds,
            "measured": one.measured,
            "over_seeds": one.over_seeds,
            "runs": len(one.values),
            "said": one.said,
        }
        for one in judged
    ]
    hardware = [(run.summary or {}).get("hardware") for runs in studies.values() for run in runs]
    return {
        "form": form,
        "verdict": verdict(expected, judged),
        "minutes": round(minutes, 1),
        "step_ms": {key: found and round(found, 3) for key, found in step_ms.items()},
        "hardware": next((found for found in hardware if found), None),
        "bands": bands,
        "arms": [row for name in studies for row in _arms(name, studies[name], expected)],
    }


def read_record(folder: Path) -> Record | None:
    """What `keep` has kept, or None."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.is_file() else None


def keep(folder: Path, record: Record, figure: Path | None) -> None:
    """Write the record, the tables in the README, and the figure into an experiment's folder."""
    (folder / FILE).write_text(json.dumps(record, indent=2) + "\n")
    if figure is not None:
        shutil.copyfile(figure, folder / figure.name)
    write_between(folder / "README.md", _tables(record))


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the marks of a file; without marks it goes to the end."""
    before = path.read_text() if path.is_file() else ""
    if BEGIN not in before:
        before = f"{before.rstrip()}\n\n{BEGIN}\n{END}\n".lstrip()
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table with its first row as the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _tables(record: Record) -> str:
    bands = [["band", "stated", "measured", "runs", ""]]
    bands += [
        [one["says"], one["band"], one["measured"], str(one["runs"]), one["said"]]
        for one in record["bands"]
    ]
    arms = [["study", "arm", "seeds", "outcome", "mean (95 % interval)"]]
    arms += [[str(cell) for cell in row.values()] for row in record["arms"]]
    took = f"{record['minutes']:g} minutes of training, all runs together"
    head = f"Verdict of the {record['form']} form: **{record['verdict']}** ({took})."
    return "\n\n".join([head, markdown(bands), markdown(arms)])


def _arms(study: str, runs: Sequence[Found], expected: Expected) -> list[dict[str, object]]:
    """A row for each arm and each outcome that a band is about, of any study if none is of this."""
    own = [band for band in expected.bands if band.study in ("", study)] or expected.bands
    rows = []
    for arm in group(runs):
        for quantity, metric, at in dict.fromkeys((b.quantity, b.metric, b.at) for b in own):
            values = [outcome(run, metric, at) for run in arm.whole]
            told = [value for value in values if value is not None]
            if metric.startswith(EFFECT) and not told:
                continue  # a transform that this arm has not
            seeds = ", ".join(str(run.seed) for run in arm.whole)
            shown = said_mean(told) if told else "-"
            if told and metric == UNTIL_REACHED:
                shown = f"{sum(told):g} of {len(told)}"
            elif told and metric == STEPS:  # of runs that were ended there is no mean
                shown = f"{min(told):g} to {max(told):g}"
            rows.append(
                {"study": study, "arm": arm.name, "seeds": seeds, "metric": quantity, "mean": shown}
            )
    return rows
