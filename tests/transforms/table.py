"""The table of the measured properties of all transforms.

python -m tests.transforms.table writes the table into gradsurg/transforms/README.md.
"""

from pathlib import Path
from typing import get_args

from gradsurg.testing import check_transform
from gradsurg.transforms.base import TransformProperty
from tests.transforms.cases import build, names
from tests.verdict_tables import cell, line, paper, write

README = Path(__file__).parents[2] / "gradsurg" / "transforms" / "README.md"
HEAD = line(
    [
        "config",
        "transform",
        *(name.replace("_", " ") for name in get_args(TransformProperty)),
        "paper",
    ]
)


def row(name: str) -> str:
    """Return the row of one config."""
    transform = build(name)
    cells = [cell(verdict) for verdict in check_transform(transform, drops_nan=True).verdicts]
    cls = type(transform)
    return line([f"`{name}`", f"`{cls.__name__}`", *cells, paper(cls)])


if __name__ == "__main__":
    write(README, HEAD, [row(name) for name in names()])
