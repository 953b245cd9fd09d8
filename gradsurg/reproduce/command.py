"""The command: a claim is run, held against its bands, and said to hold or not."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradsurg.effects.tables import aligned
from gradsurg.report.load import NotAStudy
from gradsurg.reproduce.expected import (
    Drawing,
    Expected,
    Form,
    WrongExperiment,
    papers,
    read_expected,
)
from gradsurg.reproduce.foreseen import faults_of
from gradsurg.reproduce.judging import HOLDS as HOLD
from gradsurg.reproduce.judging import TOLD, judge
from gradsurg.reproduce.record import (
    Record,
    keep,
    markdown,
    read_record,
    record_of,
    write_between,
)
from gradsurg.reproduce.running import Study, plan_study, run_study

PLACES = ("out=", "hydra", "task.root=", "threads=", "device=", "logger=", "report=", "force=")
"""The words that change nothing of what is asked."""
MINUTES = 5  # the column that the front table does without
HOLDS, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(root: Path, words: Sequence[str]) -> int:
    """Do what the command line asks for, of the project at `root`; the exit code.

    It is 0 if every band holds, 1 if one does not, 2 if the command or an `expected.yaml` is wrong.
    """
    asked = _parser().parse_intermixed_args(words)
    chosen = [word for word in asked.words if "=" not in word]
    overrides = [word for word in asked.words if "=" in word]
    try:
        if asked.all or asked.list or asked.table:
            chosen = papers(root)
        if not chosen:
            raise WrongExperiment(f"name a paper. There are: {', '.join(papers(root)) or 'none'}.")
        expected = {paper: read_expected(root, paper) for paper in chosen}
        if asked.list:
            print(_list(root, expected))
            return HOLDS
        if asked.table:
            return _table(root, expected, asked.write)
        form: Form = "full" if asked.full or asked.cost else "quick"
        if lacking := [paper for paper in chosen if form == "full" and not expected[paper].full]:
            raise WrongExperiment(f"{', '.join(lacking)}: there is no full form")
        if asked.cost:
            print("\n".join(_cost(root, paper, expected[paper], overrides) for paper in chosen))
            return HOLDS
        if asked.write and (other := [word for word in overrides if not word.startswith(PLACES)]):
            rule = "--write keeps what the study itself asks for"
            raise WrongExperiment(f"{rule}: leave out {' '.join(other)}, or --write")
        folder = root / "experiments"
        whole = [
            _one(folder / paper, own, form, overrides, asked.write)
            for paper, own in expected.items()
        ]
    except (WrongExperiment, NotAStudy) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return HOLDS if all(whole) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "reproduce.py",
        description="Run a published claim again and hold it against its bands.",
        allow_abbrev=False,
    )
    text = "papers, and words for the runner, as hydra/launcher=joblib or out=elsewhere"
    parser.add_argument("words", nargs="*", metavar="paper", help=text)
    parser.add_argument("--full", action="store_true", help="at the paper's scale")
    text = "what the full form would take, by the steps of the quick one; nothing is run"
    parser.add_argument("--cost", action="store_true", help=text)
    parser.add_argument("--all", action="store_true", help="all papers")
    parser.add_argument("--list", action="store_true", help="the papers, their claims and verdicts")
    parser.add_argument("--table", action="store_true", help="the front table, from what was kept")
    text = "keep what was measured in experiments/, with --table the tables there and in README.md"
    parser.add_argument("--write", action="store_true", help=text)
    return parser


def _one(folder: Path, expected: Expected, form: Form, words: Sequence[str], write: bool) -> bool:
    """Run the paper of a folder and tell what came of it; whether every band holds."""
    paper = folder.name
    other = [word for word in words if not word.startswith(PLACES)]
    names = expected.studies(form)
    planned = {key: plan_study(name, words) for key, name in names.items()}
    foreseen = {key: own.runs for key, own in planned.items()}
    # asked for with other words it is another study, which may have other runs
    if not other and (faults := faults_of(expected, foreseen)):
        raise WrongExperiment("\n".join(f"{paper}: {fault}" for fault in faults))
    studies = {key: run_study(name, words, planned[key]) for key, name in names.items()}
    runs = {key: study.runs for key, study in studies.items()}
    judged = judge(expected, runs)
    minutes = sum(study.minutes for study in studies.values())
    step_ms = {key: study.step_ms for key, study in studies.items()}
    record = record_of(expected, form, judged, runs, minutes, step_ms)
    figure = _figure(expected, studies)
    print(f"\n{paper}: {expected.claim}\n{expected.source}\n")
    rows = [["band", "stated", "measured", "runs", ""]]
    for one in judged:
        found = [one.band.name, one.band.bounds, one.measured, str(len(one.values))]
        rows.append([*found, one.said])
    print(aligned(rows))
    if figure is None and expected.figure:
        print("figure: none, no run has what it shows")
    elif figure is not None:
        print(f"figure: {figure}")
    asked = f", with {' '.join(other)}, which is not what the claim is about" if other else ""
    print(f"{paper}, {form} form: {record['verdict']}{_conditions(expected)}{asked}")
    for one in judged:
        if not one.holds:
            print(f"{one.band.name} does not hold: {one.band.says} Found: {one.measured}.")
    if write:
        keep(folder, record, figure)
    return all(one.holds for one in judged)


def _cost(root: Path, paper: str, expected: Expected, words: Sequence[str]) -> str:
    """The steps of the full form, and the hours that they would take at what the quick one took."""
    record = read_record(root / "experiments" / paper) or {}
    measured = record.get("step_ms", {})
    steps, hours, unknown = 0, 0.0, False
    for key, name in expected.studies("full").items():
        try:
            planned = plan_study(name, words).steps
        except WrongExperiment as error:
            return f"{paper}: {error}"
        steps += planned
        unknown = unknown or not measured.get(key)
        hours += planned * (measured.get(key) or 0) / 3_600_000
    if unknown:
        return f"{paper}: {steps:,} steps; the quick form has not been measured"
    return f"{paper}: {steps:,} steps, {hours:.3g} hours of one core at the quick form's pace"


def _conditions(expected: Expected) -> str:
    return f" ({expected.conditions})" if expected.conditions else ""


def _figure(expected: Expected, studies: dict[str, Study]) -> Path | None:
    """The paper's figure, drawn here or by the report of its first study; None if there is none."""
    folder = studies[expected.quick[0]].folder / "report"
    if isinstance(expected.figure, Drawing):
        from gradsurg.reproduce.figures import draw  # matplotlib takes a second

        shown = expected.figure.studies or tuple(studies)
        return draw(expected.figure, [run for key in shown for run in studies[key].runs], folder)
    path = folder / f"{expected.figure}.png"
    return path if path.is_file() else None


def _list(root: Path, expected: dict[str, Expected]) -> str:
    rows = [["paper", "verdict", "minutes", "claim"]]
    for paper, own in expected.items():
        record = read_record(root / "experiments" / paper)
        rows.append([paper, *_kept(record), own.claim])
    return aligned(rows, left=4)


def _kept(record: Record | None) -> tuple[str, str]:
    return (record["verdict"], f"{record['minutes']:g}") if record else ("not measured", "-")


def _measured(expected: Expected, record: Record) -> str:
    """What was measured, in the words of the claim, and how many bands hold."""
    values = {band["name"]: band["over_seeds"] for band in record["bands"]}
    judged = [band["said"] for band in record["bands"] if band["said"] != TOLD]
    held = f"{judged.count(HOLD)} of {len(judged)} bands hold"
    told = re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "-"), expected.front)
    return f"{told}; {held}" if told else held


def _table(root: Path, expected: dict[str, Expected], write: bool) -> int:
    """The front table; with `write` into the index too."""
    rows = [["paper", "claim", "published", "measured here", "verdict", "minutes"]]
    for paper, own in expected.items():
        record = read_record(root / "experiments" / paper)
        verdict, minutes = _kept(record)
        measured = _measured(own, record) if record else "-"
        link = f"[`{paper}`](experiments/{paper}/README.md)"
        rows.append([link, own.claim, own.published, measured, verdict, minutes])
    print(markdown(rows))
    if write:
        index = [[row[0].replace("(experiments/", "("), *row[1:]] for row in rows]
        index = [[*index[0], "command"]] + [
            [*row, f"`python scripts/reproduce.py {paper}`"]
            for row, paper in zip(index[1:], expected, strict=True)
        ]
        write_between(root / "experiments" / "README.md", markdown(index))
        front = [[cell for place, cell in enumerate(row) if place != MINUTES] for row in rows]
        write_between(root / "README.md", markdown(front))
    return HOLDS
