"""The command line of a reproduction: run a paper's studies, judge them, print and record.

Torch is imported after parsing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.effects.tables import aligned
from gradsurg.experiments import ROOT
from gradsurg.plugins.messages import typed_command
from gradsurg.report.load import NotAStudy
from gradsurg.report.wording import table_width
from gradsurg.reproduce.expected import (
    Drawing,
    Expected,
    Form,
    WrongExperiment,
    papers,
    read_expected,
)
from gradsurg.reproduce.judge import judge
from gradsurg.reproduce.record import (
    Record,
    chance_of_all,
    make_record,
    markdown,
    place,
    read_record,
    recorded_verdict,
    summary,
    write_between,
    write_record,
    write_tables,
)

if TYPE_CHECKING:
    from gradsurg.report.study import Study

NEUTRAL = ("out=", "hydra", "task.root=", "threads=", "device=", "logger=", "report=", "force=")
"""Beginnings of overrides that leave the question of a study as it is."""
ALL_HOLD, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(words: Sequence[str] | None = None, root: Path | None = ROOT) -> int:
    """Run the command on the checkout `root` and return the exit code.

    0: every band holds, 1: one does not, 2: the command or an `expected.yaml` is wrong, or there is
    no checkout.
    """
    arguments = parser().parse_intermixed_args(words)
    if root is None:
        print("reproduce needs a checkout of gradsurg: a wheel has no experiments", file=sys.stderr)
        return WRONG_INPUT
    chosen = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word]
    try:
        if arguments.all or arguments.list or arguments.table:
            chosen = papers(root)
        if not chosen:
            raise WrongExperiment(f"name a paper. There are: {', '.join(papers(root)) or 'none'}.")
        expected = {paper: read_expected(root, paper) for paper in chosen}
        if arguments.list:
            print(_list(root, expected))
            return ALL_HOLD
        if arguments.table:
            return _table(root, expected, arguments.write)
        form: Form = "full" if arguments.full or arguments.cost else "quick"
        if lacking := [paper for paper in chosen if form == "full" and not expected[paper].full]:
            raise WrongExperiment(f"{', '.join(lacking)}: there is no full form")
        if arguments.cost:
            from gradsurg.reproduce.studies import full_cost

            print("\n".join(full_cost(root, paper, expected[paper], overrides) for paper in chosen))
            return ALL_HOLD
        if arguments.write and (other := _changing(overrides)):
            rule = "--write records the study as it is configured"
            raise WrongExperiment(f"{rule}: leave out {' '.join(other)}, or --write")
        results = [
            _reproduce(root / "experiments" / paper, claim, form, overrides, arguments.write)
            for paper, claim in expected.items()
        ]
    except (WrongExperiment, NotAStudy) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return ALL_HOLD if all(results) else FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        typed_command("gradsurg.reproduce"),
        description="Run a published claim again and compare it with the bands stated for it.",
        allow_abbrev=False,
    )
    text = "papers, and overrides for the runner, as hydra/launcher=joblib or out=elsewhere"
    made.add_argument("words", nargs="*", metavar="paper", help=text)
    made.add_argument("--full", action="store_true", help="at the paper's scale")
    text = "estimate the time of the full form from the quick form's steps; nothing is run"
    made.add_argument("--cost", action="store_true", help=text)
    made.add_argument("--all", action="store_true", help="all papers")
    made.add_argument("--list", action="store_true", help="the papers, their claims and verdicts")
    made.add_argument("--table", action="store_true", help="the claims' table, from the records")
    text = "write the record, figure and tables to experiments/; with --table its README.md"
    made.add_argument("--write", action="store_true", help=text)
    return made


def _changing(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the study."""
    return [word for word in overrides if not word.startswith(NEUTRAL)]


def _reproduce(
    folder: Path, expected: Expected, form: Form, overrides: Sequence[str], write: bool
) -> bool:
    """Run a paper's studies, print the bands and return whether all hold."""
    from gradsurg.reproduce.studies import missing_measurements, plan_study, run_study

    paper, expected = folder.name, expected.of(form)
    other = _changing(overrides)
    names = expected.studies(form)
    plans = {key: plan_study(name, overrides) for key, name in names.items()}
    planned = {key: plan.runs for key, plan in plans.items()}
    # with other overrides it is another study, which may have other runs
    if not other and (faults := missing_measurements(expected, planned)):
        raise WrongExperiment("\n".join(f"{paper}: {fault}" for fault in faults))
    ended = {key: run_study(name, overrides, plans[key]) for key, name in names.items()}
    studies = {key: one.study for key, one in ended.items()}
    judgements = judge(expected, studies)
    minutes = sum(one.minutes for one in ended.values())
    step_ms = {key: one.step_ms for key, one in ended.items()}
    record = make_record(expected, form, judgements, studies, minutes, step_ms)
    figure = _figure(expected, studies)
    print(f"\n{paper}: {expected.claim}\n{expected.source}\n")
    rows = [["band", "stated", "measured", "runs", ""]]
    for item in judgements:
        cells = [item.band.name, item.band.bounds, item.measured, str(len(item.values))]
        rows.append([*cells, item.result])
    print(aligned(rows))
    if figure is None and expected.figure:
        print("figure: none, no run has the numbers that it shows")
    elif figure is not None:
        print(f"figure: {figure}")
    conditions = f" ({expected.conditions})" if expected.conditions else ""
    changed = f", with {' '.join(other)}, which is not what the claim is about" if other else ""
    print(f"{paper}, {form} form: {record['verdict']}{conditions}{changed}")
    if not other and (chance := chance_of_all(expected, record)) != "-":
        print(f"Probability that all bands hold for as many new seeds: {chance}")
    for item in judgements:
        if not item.holds:
            print(f"{item.band.name} does not hold: {item.band.says} Found: {item.measured}.")
    if write:
        write_record(folder, expected, record, figure)
    return all(item.holds for item in judgements)


def _figure(expected: Expected, studies: "dict[str, Study]") -> Path | None:
    """Draw the paper's figure, or take it from the report of its first study; None if missing."""
    folder = studies[expected.quick[0]].folder / "report"
    if isinstance(expected.figure, Drawing):
        from gradsurg.report.arms import group
        from gradsurg.report.study import Study
        from gradsurg.reproduce.figures import draw  # plotting libraries take a second to import

        shown = [studies[key] for key in expected.figure.studies or studies]
        runs = {run.name: run for study in shown for run in study.all_runs}
        return draw(expected.figure, Study(shown[0].folder, group([*runs.values()])), folder)
    path = folder / f"{expected.figure}.png"
    return path if path.is_file() else None


def _list(root: Path, expected: dict[str, Expected]) -> str:
    rows = [["paper", "verdict", "minutes", "claim", "conditions"]]
    for paper, claim in expected.items():
        record = read_record(root / "experiments" / paper)
        verdict = recorded_verdict(claim, record)
        rows.append([paper, verdict, _minutes(record), claim.claim, claim.conditions or "-"])
    return aligned(rows, left=(0, 1, 3, 4), width=table_width())


def _places(places: dict[str, list[str]]) -> str:
    """Return hardware and versions; those of all but the most papers with the papers' names."""
    first, *others = sorted(places, key=lambda text: -len(places[text]))
    return "; ".join([first, *(f"{', '.join(places[text])}: {text}" for text in others)])


def _minutes(record: Record | None) -> str:
    return f"{record['minutes']:g}" if record else "-"


def _table(root: Path, expected: dict[str, Expected], write: bool) -> int:
    """Print the claims' table; with `write` put it and the papers' tables into the READMEs."""
    rows = [["paper", "claim", "published", "measured here", "verdict", "again", "minutes"]]
    places: dict[str, list[str]] = {}
    for paper, claim in expected.items():
        folder = root / "experiments" / paper
        record = read_record(folder)
        verdict = recorded_verdict(claim, record)
        if claim.conditions:
            verdict += f": {claim.conditions}"
        measured, chance = "-", "-"
        if record is not None:
            measured, chance = summary(claim, record), chance_of_all(claim, record)
            places.setdefault(place(record), []).append(paper)
            if write:
                write_tables(folder, claim, record)
        link = f"[`{paper}`]({paper}/README.md)"
        cells = [claim.claim, claim.published, measured, verdict, chance, _minutes(record)]
        rows.append([link, *cells])
    table = markdown(rows)
    if places:
        table = f"Measured on {_places(places)}.\n\n{table}"
    print(table)
    if write:
        write_between(root / "experiments" / "README.md", table)
    return ALL_HOLD
