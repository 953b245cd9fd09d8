"""The command line of a reproduction: run a paper's studies, judge them, print and record.

Torch is imported after parsing.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from gradsurg.effects.tables import aligned
from gradsurg.experiments import ROOT
from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import NAMES_WIDTH, typed_command
from gradsurg.report.load import NotAStudy
from gradsurg.report.wording import table_width
from gradsurg.reproduce.expected import (
    Expected,
    Form,
    WrongExperiment,
    papers,
    read_expected,
)
from gradsurg.reproduce.judge import UNMEASURED, judge, verdicts
from gradsurg.reproduce.record import (
    band_rows,
    conclusion,
    filled,
    make_record,
    markdown,
    place,
    read_record,
    recorded,
    write_between,
    write_record,
    write_tables,
)

if TYPE_CHECKING:
    from gradsurg.report.study import Study

NEUTRAL = ("out=", "hydra", "task.root=", "threads=", "device=", "logger=", "report=", "force=")
"""Beginnings of overrides that leave the question of a study as it is."""
SAME, OTHER, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(words: Sequence[str] | None = None, root: Path | None = ROOT) -> int:
    """Run the command on the checkout `root` and return the exit code.

    It is 0 if each claim has its recorded verdict, and 1 if one has another or could not be judged.
    It is 2 if the command or an `expected.yaml` is wrong, or a checkout or an extra is missing.
    """
    arguments = parser().parse_intermixed_args(words)
    if root is None:
        print("reproduce needs a checkout of gradsurg: a wheel has no experiments", file=sys.stderr)
        return WRONG_INPUT
    chosen = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word]
    try:
        need("run")
        if arguments.all or arguments.list or arguments.table:
            chosen = papers(root)
        if not chosen:
            raise WrongExperiment(f"name a paper. There are: {', '.join(papers(root)) or 'none'}.")
        expected = {paper: read_expected(root, paper) for paper in chosen}
        if arguments.list:
            print(_list(root, expected))
            return SAME
        if arguments.table:
            return _table(root, expected, arguments.write)
        form: Form = "full" if arguments.full or arguments.cost else "quick"
        if lacking := [paper for paper in chosen if form == "full" and not expected[paper].full]:
            raise WrongExperiment(f"{', '.join(lacking)}: there is no full form")
        if arguments.cost:
            from gradsurg.reproduce.studies import full_cost

            print("\n".join(full_cost(root, paper, expected[paper], overrides) for paper in chosen))
            return SAME
        if arguments.write and (other := _changing(overrides)):
            rule = "--write records the study as it is configured"
            raise WrongExperiment(f"{rule}: leave out {' '.join(other)}, or --write")
        results = [
            _reproduce(root / "experiments" / paper, claim, form, overrides, arguments.write)
            for paper, claim in expected.items()
        ]
    except (WrongExperiment, NotAStudy, MissingExtra) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return SAME if all(results) else OTHER


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
    """Run a paper's studies, print bands and verdicts, return whether they are as recorded."""
    from gradsurg.reproduce.studies import missing_measurements, plan_study, run_study, words_of

    paper, other = folder.name, _changing(overrides)
    words = {key: words_of(folder, name, overrides) for key, name in expected.studies(form).items()}
    plans = {key: plan_study(own) for key, own in words.items()}
    planned = {key: plan.runs for key, plan in plans.items()}
    # with other overrides it is another study, which may have other runs
    if not other and (faults := missing_measurements(expected, planned)):
        raise WrongExperiment("\n".join(f"{paper}: {fault}" for fault in faults))
    ended = {key: run_study(own, plans[key]) for key, own in words.items()}
    studies = {key: one.study for key, one in ended.items()}
    judgements = judge(expected, studies)
    minutes = sum(one.minutes for one in ended.values())
    step_ms = {key: one.step_ms for key, one in ended.items()}
    record = make_record(expected, form, judgements, studies, minutes, step_ms)
    figure = _figure(paper, expected, studies)
    found = verdicts(expected, judgements)
    print(f"\n{paper}, {form} form: {expected.source}\n")
    print(aligned(band_rows(found), left=(0, 1), width=table_width()))
    if figure is None and expected.figure:
        print("figure: none, no run has the numbers that it shows")
    elif figure is not None:
        print(f"figure: {figure}")
    if other:
        print(f"with {' '.join(other)}, which is not what the claims are about:")
    before = [] if other else recorded(expected, read_record(folder, form))
    same = all(each.result != UNMEASURED for each in found)
    for each in found:
        print(f"{paper}, {each.name}: {conclusion(each).replace('**', '')}")
    for each, was in zip(found, before, strict=False):
        if was.result not in (UNMEASURED, each.result):
            print(f"{paper}, {each.name}: another verdict than the recorded one, {was.result}.")
            same = False
    if write:
        write_record(folder, expected, record, figure)
    return same


def _figure(paper: str, expected: Expected, studies: "dict[str, Study]") -> Path | None:
    """Draw the paper's figure into the report of its first study; None if it has none."""
    if expected.figure is None:
        return None
    from gradsurg.report.arms import group
    from gradsurg.report.study import Study
    from gradsurg.reproduce.figures import draw  # plotting libraries take a second to import

    folder = studies[expected.quick[0]].folder / "report"
    shown = [studies[key] for key in expected.figure.studies or studies]
    runs = {run.name: run for study in shown for run in study.all_runs}
    return draw(expected.figure, Study(shown[0].folder, group([*runs.values()])), folder, paper)


def _list(root: Path, expected: dict[str, Expected]) -> str:
    """Two lines a claim: its paper, name, verdict and minutes, and the beginning of the claim."""
    rows, texts = [["paper", "claim", "verdict", "minutes"]], []
    for paper, one in expected.items():
        record = read_record(root / "experiments" / paper)
        minutes = f"{record['minutes']:g}" if record else "-"
        for each in recorded(one, record):
            verdict = each.result + ", with conditions" * bool(each.claim.conditions)
            rows.append([paper, each.name, verdict, minutes])
            width = min(NAMES_WIDTH, table_width()) - 2
            texts.append(f"  {shorten(each.claim.says, width, placeholder=' ..')}")
    head, rule, *lines = aligned(rows, left=3).split("\n")
    both = chain(*zip(lines, texts, strict=True))
    end = "experiments/README.md has the whole claims, conditions and numbers."
    return "\n".join([head, rule, *both, "", end])


def _places(places: dict[str, list[str]]) -> str:
    """Return the most common hardware and versions, then the others with their papers' names."""
    first, *others = sorted(places, key=lambda text: -len(places[text]))
    return "; ".join([first, *(f"{', '.join(places[text])}: {text}" for text in others)])


def _table(root: Path, expected: dict[str, Expected], write: bool) -> int:
    """Print the claims' table; with `write` put it and the papers' tables into the READMEs."""
    rows = [["paper", "claim", "measured here", "verdict", "again", "minutes"]]
    places: dict[str, list[str]] = {}
    for paper, one in expected.items():
        folder = root / "experiments" / paper
        record = read_record(folder)
        if record is not None:
            places.setdefault(place(record), []).append(paper)
            if write:
                write_tables(folder, one, record)
        found = recorded(one, record)
        for each in found:
            claim, reason = each.claim, each.claim.not_tested or each.claim.conditions
            verdict = f"**{each.result}**{': ' if reason else ''}{reason}"
            measured = filled(claim.front, found) if record else "-"
            minutes = f"{record['minutes']:g}" if record else "-"
            link = f"[`{paper}`]({paper}/README.md) {each.name}"
            rows.append([link, claim.says, measured, verdict, each.again, minutes])
    table = markdown(rows)
    if places:
        table = f"Measured on {_places(places)}.\n\n{table}"
    print(table)
    if write:
        write_between(root / "experiments" / "README.md", table)
    return SAME
