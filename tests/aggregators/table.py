"""Which aggregator has which property: measured, not claimed.

python -m tests.aggregators.table writes the table into gradsurg/aggregators/README.md.
"""

from pathlib import Path
from typing import get_args

from gradsurg.aggregators.base import AggregatorProperty
from gradsurg.plugins.registry import names
from gradsurg.testing import check_aggregator
from tests.aggregators.cases import made
from tests.verdict_tables import cell, line, paper, write

README = Path(__file__).parents[2] / "gradsurg" / "aggregators" / "README.md"
HEAD = line(
    ["aggregator", *(name.replace("_", " ") for name in get_args(AggregatorProperty)), "paper"]
)


def row(name: str) -> str:
    """The line of one aggregator."""
    aggregator = made(name)
    cells = [cell(verdict) for verdict in check_aggregator(aggregator, count=12).verdicts]
    cls = type(aggregator)
    return line([f"`{cls.__name__}`", *cells, paper(cls)])


if __name__ == "__main__":
    write(README, HEAD, [row(name) for name in names("aggregators")])
