"""Which aggregator has which property: measured, not claimed.

python -m tests.aggregators.table writes the table into gradsurg/aggregators/README.md.
"""

import inspect
import re
from pathlib import Path
from typing import get_args

from gradsurg.aggregators.base import Property
from gradsurg.catalogue import names
from gradsurg.testing import Verdict, check_aggregator
from tests.aggregators.cases import made

README = Path(__file__).parents[2] / "gradsurg" / "aggregators" / "README.md"
BEGIN, END = "<!-- properties: begin -->", "<!-- properties: end -->"

NAME = r"[A-Z][\w-]+"
PAPER = rf"({NAME}(?:(?:, {NAME})* and {NAME}| et al\.)?,? (?:{NAME} )?(?:19|20)\d\d)"
"""Authors, a venue and a year, as the docstrings have them."""


def paper(cls: type) -> str:
    """What a docstring cites first, rather with a number at arXiv; empty if it cites nothing."""
    text = " ".join((inspect.getdoc(cls) or "").split())
    found = re.search(rf"{PAPER} \(arXiv ([\d.]*\d)", text) or re.search(rf"{PAPER}()", text)
    if not found:
        return ""
    cited, number = found.groups()
    return f"[{cited}](https://arxiv.org/abs/{number})" if number else cited


def cell(verdict: Verdict) -> str:
    """What the table says of a verdict."""
    if not verdict.holds:
        return ""
    return "yes" if verdict.declared else "(yes)"


def row(name: str) -> str:
    """The line of one aggregator."""
    aggregator = made(name)
    cells = [cell(verdict) for verdict in check_aggregator(aggregator).verdicts]
    cls = type(aggregator)
    words = [f"`{cls.__name__}`", *cells, paper(cls)]
    return f"| {' | '.join(words)} |"


def head() -> str:
    """The first line: the properties."""
    columns = [name.replace("_", " ") for name in get_args(Property)]
    return f"| {' | '.join(['aggregator', *columns, 'paper'])} |"


def table() -> str:
    """Aggregators down, properties across."""
    return "\n".join(
        [head(), f"|{'---|' * (len(get_args(Property)) + 2)}", *map(row, names("aggregators"))]
    )


def written() -> list[str]:
    """The lines of the table as it stands in the README."""
    text = README.read_text().partition(BEGIN)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")]


def main() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
