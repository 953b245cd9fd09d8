"""Markdown tables of the verdicts of `gradsurg.testing`, read from and written to READMEs."""

from collections.abc import Sequence
from pathlib import Path

from gradsurg.testing import Verdict

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def cell(verdict: Verdict) -> str:
    """Return the cell of a verdict: `yes`, `(yes)` if it is not declared, or empty.

    `not tested` if no case could have decided it.
    """
    if not verdict.holds:
        return ""
    if not verdict.tested:
        return "not tested"
    return "yes" if verdict.declared else "(yes)"


def line(words: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(words)} |"


def write(readme: Path, head: str, rows: Sequence[str]) -> None:
    """Replace the table of a README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join([head, f"|{'---|' * (head.count('|') - 1)}", *rows])
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def written(readme: Path) -> list[str]:
    """Return the lines of the table of a README, the head first."""
    text = readme.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")]


def insert(readme: Path, row: str, order: Sequence[str]) -> bool:
    """Put the row of a plug-in into the table of a README, and return whether that changed it.

    `order` has the names of all plug-ins; underscores and capitals do not count.
    """
    head, *old = written(readme)
    if row in old:
        return False
    rows = {line.split("|")[1].strip(" `").lower().replace("_", ""): line for line in (*old, row)}
    write(readme, head, [rows[key] for name in order if (key := name.replace("_", "")) in rows])
    return True
