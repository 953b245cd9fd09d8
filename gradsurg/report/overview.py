"""What the command prints of a study: the answer first, then arms, then what did not finish."""

from io import StringIO
from textwrap import fill

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsurg.report.alone import alone_rows
from gradsurg.report.attribution import shares_text
from gradsurg.report.certainty import p_text
from gradsurg.report.conflict_text import (
    SINGLE_NUMBERS,
    about_conflicts,
    conflict_rows,
    others_lines,
)
from gradsurg.report.outcomes import Outcome
from gradsurg.report.study_report import StudyReport
from gradsurg.report.update_line import update_line
from gradsurg.report.wording import amount, count, interval, unbroken, value

MAX_LISTED = 20
MAX_WHOLE = 8  # with more arms only the headline is printed, the page has the rest
SHORT = {"no clear difference": "unclear", "one seed: no interval": ""}  # readings in the table
NARROWEST = 24  # column of names that are folded rather than a table cut in two
WIDTH = 100  # where the output is no terminal
LOOKS = {"finished": "green", "diverged": "red", "failed": "red", "unreadable": "red"}


def overview(report: StudyReport) -> str:
    """What is printed, as plain text of the terminal's width."""
    terminal = Console()
    width = terminal.width if terminal.is_terminal else WIDTH
    console = Console(file=StringIO(), width=width, highlight=False, color_system=None)
    _print(report, console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip()


def print_overview(report: StudyReport) -> None:
    """To standard output, with colours if that is a terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print(report, console)
    else:
        console.print(Text(overview(report)), soft_wrap=True)


def _print(report: StudyReport, console: Console) -> None:
    console.print(Text(_folded(report.answer, console.width)))
    for text in report.cautions:
        console.print(Text(text, style="dim"))
    console.print()
    console.print(_states(report))
    for text in [*report.effort, report.about_tests]:
        if text:
            console.print(Text(text))
    arms = len({outcome.arm.name for outcome in report.outcomes})
    compared = any(outcome.difference for outcome in report.outcomes)
    for metric, name in list(report.metrics.items())[: None if arms <= MAX_WHOLE else 1]:
        own = [one for one in report.outcomes if one.metric == metric and one.is_known]
        if compared and own:
            console.print()
            console.print(_outcomes(own, name))
    if report.alone:
        console.print()
        console.print(_alone(report))
    if report.conflicts:
        console.print()
        for table in _conflicts(report, console.width):
            console.print(table)
        console.print(Text(_folded(about_conflicts(report.conflicts), console.width), style="dim"))
    if arms <= MAX_WHOLE:
        for text in [*_shares(report), *_updates(report), *others_lines(report.conflicts)]:
            console.print()
            console.print(Text(text))
    if _unfinished(report).row_count:
        console.print()
        console.print(_unfinished(report))


def _folded(text: str, width: int) -> str:
    """In lines; rich would break at any kind of space."""
    return fill(unbroken(text), width, break_on_hyphens=False).replace("\u00a0", " ")


def _alone(report: StudyReport) -> Table:
    title = "not compared: mean (least to most)"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, head in enumerate(["arm", "n", *report.metrics.values()]):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for row in alone_rows(report.alone, list(report.metrics)):
        table.add_row(*[Text(cell) for cell in row])
    return table


def _conflicts(report: StudyReport, width: int) -> list[Table]:
    """An arm a row, a long name in several lines; in two tables where one would not fit."""
    heads, rows = conflict_rows(report.conflicts)
    name, *widths = (
        max(map(len, [*head.split("\n"), *cells]))
        for head, *cells in zip(heads, *rows, strict=True)
    )
    if min(name, NARROWEST) + sum(widths) + 2 * len(widths) <= width:
        return [_conflict_table(heads, rows)]
    half = SINGLE_NUMBERS
    last = [[row[0], *row[half:]] for row in rows]
    return [
        _conflict_table(heads[:half], [row[:half] for row in rows]),
        _conflict_table([heads[0], *heads[half:]], last),
    ]


def _conflict_table(heads: list[str], rows: list[list[str]]) -> Table:
    title = "conflict between tasks"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, head in enumerate(heads):
        justify = "right" if place else "left"
        table.add_column(head, justify=justify, no_wrap=place > 0, overflow="fold")
    for row in rows[:MAX_LISTED]:
        table.add_row(*[Text(cell) for cell in row])
    if len(rows) > MAX_LISTED:
        table.add_row(Text(f"and {len(rows) - MAX_LISTED} more: the page lists them"))
    return table


def _shares(report: StudyReport) -> list[str]:
    """What each link of a chain adds to the headline metric, chain by chain."""
    headline = next((key for key in report.metrics), "")
    own = [outcome for outcome in report.shares if outcome.metric == headline]
    said = []
    for name in dict.fromkeys(outcome.arm.name for outcome in own):
        links = {o.link: (o.treated, o.control) for o in own if o.arm.name == name}
        said.append(f"{name}. {shares_text(headline, links)}")
    return said


def _updates(report: StudyReport) -> list[str]:
    return [f"{effect.arm.name}: {update_line(effect.summaries)}" for effect in report.updates]


def _states(report: StudyReport) -> Text:
    text = Text(f"{count(len(report.runs), 'run')}:")
    for state, number in report.states.items():
        text.append(f" {number} {state}", LOOKS.get(state, "yellow"))
    return text


def _outcomes(outcomes: list[Outcome], name: str) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
    many = any(outcome.q_value is not None for outcome in outcomes)
    columns = ["arm", "n", "treated", "control", "difference", "95 % interval", "p"]
    heads = [*columns, *["q"] * many, "reading"]
    rows = [_row(outcome, many) for outcome in outcomes]
    for head in heads:
        words = head in ("arm", "reading")  # which can be wrapped, numbers not
        justify = "left" if words else "right"
        table.add_column(head, justify=justify, no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    return table


def _row(outcome: Outcome, many: bool) -> list[str]:
    found, key = outcome.difference, outcome.metric
    lost = ", ".join(f"{number} {state}" for state, number in outcome.states.items())
    if found is None:
        return [outcome.arm.name, f"0 of {outcome.planned}", *[""] * (5 + many), lost]
    planned = "" if found.n == outcome.planned else f" of {outcome.planned}"
    return [
        outcome.arm.name,
        f"{found.n}{planned}",
        value(key, sum(outcome.treated) / found.n),
        value(key, sum(outcome.control) / found.n),
        amount(key, found.mean),
        interval(key, found),
        p_text(outcome.p_value),
        *[p_text(outcome.q_value)] * many,
        "; ".join(part for part in (SHORT.get(outcome.reading, outcome.reading), lost) if part),
    ]


def _unfinished(report: StudyReport) -> Table:
    """Every run that is not finished, with the reason; of very many the first."""
    table = Table(box=None, pad_edge=False)
    for head in ("not finished", "state", "reason"):
        table.add_column(head, overflow="fold")
    runs = [run for run in report.runs if run.state != "finished"]
    for run in runs[:MAX_LISTED]:
        table.add_row(Text(run.name), Text(run.state, LOOKS.get(run.state, "")), Text(run.reason))
    if len(runs) > MAX_LISTED:
        table.add_row(Text(f"and {len(runs) - MAX_LISTED} more: the page lists them"), "", "")
    return table
