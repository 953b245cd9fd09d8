"""The figure of where points went: contours of the losses and their mean, the ways of each arm."""

from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from gradsurg.report.series import Landscape, Way
from gradsurg.report.wording import is_share

TREATED, CONTROL, UNCLEAR, INK = "#0072B2", "#D55E00", "#767676", "#222222"
PARETO, END = "#CC79A7", "#E69F00"
ARMS = (TREATED, CONTROL, "#009E73", PARETO, END, "#56B4E9", INK)

COLUMNS = 4
SIDE = 2.6  # of a panel, in inches
LEVELS = 15
END_MARK = {"marker": "*", "color": END, "markeredgecolor": INK, "markersize": 9}
MAX_ARMS = 21  # more panels than these are not read in print


def draw_trajectories(landscape: Landscape) -> Figure:
    """A panel for each loss, one for their mean, and over the mean one for each arm."""
    mean = np.array(landscape.mean, dtype=float)
    shown = landscape.arms[:MAX_ARMS]
    count = len(landscape.values) + 1 + len(shown)
    columns = min(COLUMNS, count)
    rows = ceil(count / columns)
    size = SIDE * columns + 0.3, SIDE * rows + 0.6
    figure = Figure(figsize=size, layout="constrained")
    axes = subplots(figure, rows, columns, count)
    titled = {f"loss {name}": np.array(table, float) for name, table in landscape.values.items()}
    tables = {**titled, "mean of the losses": mean}
    for panel, (title, table) in zip(axes, tables.items(), strict=False):
        _ground(panel, landscape, table, alone=True)
        panel.set_title(title)
    for panel, arm in zip(axes[len(tables) :], shown, strict=False):
        _ground(panel, landscape, mean, alone=False)
        for way in arm.ways:
            _way(panel, way)
        panel.set_title(cut(arm.name))
    _legend(figure, len(shown), len(landscape.arms))
    return figure


def _ground(panel: Axes, landscape: Landscape, table: np.ndarray, alone: bool) -> None:
    # ranks make valleys and plateaus seen alike
    known = np.ma.masked_invalid(table)
    ranks = np.linspace(0, 1, LEVELS)
    levels = np.unique(np.quantile(known.compressed(), ranks)) if known.count() else []
    grid = (landscape.x1, landscape.x2, known)
    if len(levels) < 2:
        pass  # it is flat
    elif alone:
        panel.contourf(*grid, levels=levels, cmap="cividis")
    else:
        panel.contour(*grid, levels=levels, colors="#999999", linewidths=0.5, linestyles="solid")
    x1, x2 = zip(*landscape.pareto, strict=True) if landscape.pareto else ((), ())
    panel.plot(x1, x2, color=PARETO, linewidth=3, alpha=0.8, solid_capstyle="round", zorder=2)
    panel.set_xlim(landscape.x1[0], landscape.x1[-1])
    panel.set_ylim(landscape.x2[0], landscape.x2[-1])
    panel.set_box_aspect(1)
    panel.set_xlabel("x1", labelpad=1)
    panel.set_ylabel("x2", labelpad=0)


def _way(panel: Axes, way: Way) -> None:
    """From dark to light; a place that alone is known has no line to it."""
    places = list(zip(way.x1, way.x2, strict=True))
    if len(places) > 2:
        lines = LineCollection(list(pairwise(places)), cmap="plasma", linewidths=1.6, zorder=3)
        lines.set_array(np.arange(len(places) - 1))
        panel.add_collection(lines, autolim=False)
    panel.plot(*places[0], "o", color=INK, markersize=4, zorder=4, clip_on=False)
    if len(places) > 1:
        panel.plot(*places[-1], **END_MARK, zorder=5)


def _legend(figure: Figure, shown: int, there: int) -> None:
    marks = [
        Line2D([], [], color=INK, marker="o", linestyle="", markersize=4, label="start"),
        Line2D([], [], **END_MARK, linestyle="", label="end"),
        Line2D([], [], color=PARETO, linewidth=3, label="Pareto set"),
    ]
    more = "" if shown == there else f"; the first {shown} of {there} arms"
    figure.legend(handles=marks, loc="outside upper left", ncols=3, fontsize=8)
    figure.supxlabel(f"arms over contours of the mean, from dark to light{more}", fontsize=8)


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
