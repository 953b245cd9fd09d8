"""What the panels of all figures have in common."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from gradsurg.report.wording import is_share

MAX_PANELS = 12  # more small panels than this are not read in print
MAX_NAME = 34


def subplots(figure: Figure, rows: int, columns: int, count: int) -> list[Axes]:
    """The first `count` panels of a grid; no empty one is left."""
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return axes[:count]


def cut(name: str) -> str:
    """A name that is too long, cut short."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def first_of(shown: int, there: int) -> str:
    """Says it where not all arms have a panel."""
    return "" if shown == there else f" (the first {shown} of {there} arms; the page has them all)"


def per_cent(axis: Any, metric: str) -> None:  # Any: matplotlib's XAxis or YAxis
    """Label an axis in per cent, if the outcome is a share."""
    if is_share(metric):
        axis.set_major_formatter(PercentFormatter(1.0))
