"""What the command prints of a study: the answer first, then arms, then what did not finish."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsurg.report.outcomes import Outcome
from gradsurg.report.study_report import StudyReport
from gradsurg.report.wording import amount, interval, value
from gradsurg.stats import verdict
from gradsurg.tables import number

MAX_LISTED = 20
MAX_WHOLE = 8  # with more arms only the headline is printed, the page has the rest
WIDTH = 120  # where the output is no terminal
LOOKS = {"finished": "green", "diverged": "red", "failed": "red", "unreadable": "red"}


def print_overview(report: StudyReport, console: Console | None = None) -> None:
    """To standard output; without colours where that is no terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(Text(report.answer))
    for text in report.cautions:
        console.print(Text(text, style="dim"))
    console.print(_states(report))
    arms = len({outcome.arm.name for outcome in report.outcomes})
    for metric, name in list(report.metrics.items())[: None if arms <= MAX_WHOLE else 1]:
        own = [outcome for outcome in report.outcomes if outcome.metric == metric]
        if own:
            console.print(_outcomes(own, name))
    if _unfinished(report).row_count:
        console.print(_unfinished(report))


def _states(report: StudyReport) -> Text:
    text = Text(f"{len(report.runs)} runs:")
    for state, count in report.states.items():
        text.append(f" {count} {state}", LOOKS.get(state, "yellow"))
    return text


def _outcomes(outcomes: list[Outcome], name: str) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
    columns = ("arm", "n", "treated", "control", "difference", "95 % interval", "p", "reading")
    for head in columns:
        table.add_column(head, justify="left" if head in ("arm", "reading") else "right")
    if any(outcome.q_value is not None for outcome in outcomes):
        table.add_column("q", justify="right")
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    return table


def _row(outcome: Outcome) -> list[Text]:
    found, key = outcome.difference, outcome.metric
    lost = ", ".join(f"{count} {state}" for state, count in outcome.states.items())
    if found is None:
        cells = [outcome.arm.name, f"0 of {outcome.planned}", *[""] * 5, lost]
        return [Text(cell) for cell in cells]
    planned = "" if found.n == outcome.planned else f" of {outcome.planned}"
    cells = [
        outcome.arm.name,
        f"{found.n}{planned}",
        value(key, sum(outcome.treated) / found.n),
        value(key, sum(outcome.control) / found.n),
        amount(key, found.mean),
        interval(key, found),
        number(outcome.p_value),
        "; ".join(part for part in (verdict(found), lost) if part),
    ]
    return [Text(cell) for cell in cells] + (
        [Text(number(outcome.q_value))] if outcome.q_value is not None else []
    )


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
