"""The table of the measured properties of all transforms.

python -m tests.transforms.table writes the table into gradsurg/transforms/README.md.
"""

from functools import cache
from pathlib import Path
from typing import get_args

from gradsurg.experiment import catalogue
from gradsurg.testing import check_transform
from gradsurg.testing.transforms import SHAPES
from gradsurg.transforms.base import TransformProperty
from tests.transforms.cases import CONFIGS, SHAPES_OF, build, names
from tests.verdict_tables import cell, line, write

# As documented; every other transform keeps a NaN in place.
DROP_NAN = ("deconvolve", "delay", "random_mask", "sanitize", "straight_through", "zero")
DROP_NAN += ("direct_feedback", "feedback_weights", "lrp")
README = Path(__file__).parents[2] / "gradsurg" / "transforms" / "README.md"
HEAD = line(
    [
        "config",
        "class",
        *(name.replace("_", " ") for name in get_args(TransformProperty)),
        "paper",
    ]
)


def row(name: str) -> str:
    """Return the row of one config, which keeps all rules."""
    transform = build(name)
    shapes = SHAPES_OF.get(name, SHAPES)
    checked = check_transform(transform, shapes=shapes, drops_nan=name in DROP_NAN)
    cells = [cell(verdict) for verdict in checked.verdicts]
    return line([f"`{name}`", f"`{type(transform).__name__}`", *cells, _papers()[name]])


@cache
def _papers() -> dict[str, str]:
    """Return the citation of each config, from its yaml file: the catalogue may be older."""
    entries = catalogue.list("transform", config_dirs=[CONFIGS.parent])
    return {one.name: f"[{one.paper}]({one.url})" if one.url else one.paper for one in entries}


if __name__ == "__main__":
    write(README, HEAD, [row(name) for name in names()])
