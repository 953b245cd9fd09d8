"""Which aggregator has which property: measured, not claimed.

python -m tests.aggregators.table writes the table into gradsurg/aggregators/README.md.
"""

from functools import cache
from pathlib import Path
from typing import get_args

from gradsurg.aggregators.base import AggregatorProperty
from gradsurg.experiment import catalogue
from gradsurg.plugins.registry import names
from gradsurg.testing import check_aggregator
from tests.aggregators.cases import CONFIGS, made
from tests.verdict_tables import cell, line, write

README = Path(__file__).parents[2] / "gradsurg" / "aggregators" / "README.md"
HEAD = line(
    ["aggregator", *(name.replace("_", " ") for name in get_args(AggregatorProperty)), "paper"]
)


def row(name: str) -> str:
    """The line of one aggregator."""
    aggregator = made(name)
    cells = [cell(verdict) for verdict in check_aggregator(aggregator, count=12).verdicts]
    return line([f"`{type(aggregator).__name__}`", *cells, _papers()[name]])


@cache
def _papers() -> dict[str, str]:
    """Return the citation of each config, from its yaml file: the catalogue may be older."""
    entries = catalogue.list("aggregator", config_dirs=[CONFIGS.parent])
    return {one.name: f"[{one.paper}]({one.url})" if one.url else one.paper for one in entries}


if __name__ == "__main__":
    write(README, HEAD, [row(name) for name in names("aggregators")])
