"""Matplotlib figures, an optional extra: trajectories over contours, the style of experiments."""

import warnings
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from gradsurg.report.charts import CONTROL, INK, TREATED, cut
from gradsurg.report.figures import numbered
from gradsurg.report.series import Landscape, Trajectory
from gradsurg.report.study import StudyReport
from gradsurg.report.wording import is_share

PARETO, END = "#cc79a7", "#e69f00"
ARMS = (TREATED, CONTROL, "#009e73", PARETO, END, "#56b4e9", INK)

STYLE: dict[Any, Any] = {  # Any: matplotlib has a type for its keys, but no public name for it
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "gradsurg",  # equal data, equal file
    "svg.fonttype": "none",
}

COLUMNS = 4
SIDE = 2.6  # of a panel, in inches
LEVELS = 15
END_MARK = {"marker": "*", "color": END, "markeredgecolor": INK, "markersize": 9}
MAX_ARMS = 21


def write_trajectories(report: StudyReport, folder: Path) -> list[Path]:
    """Write the trajectories of each landscape as SVG and PNG; return the PNG files."""
    written = []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # about long names and fonts, which a user cannot change
        warnings.filterwarnings("ignore", "Tight layout|Glyph", UserWarning)
        for name, landscape in numbered("trajectories", report.landscapes).items():
            figure = draw_trajectories(landscape)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=130)
            written.append(folder / f"{name}.png")
    return written


def draw_trajectories(landscape: Landscape) -> Figure:
    """Draw a panel for each loss, one for their mean, and one for the trajectories of each arm."""
    mean = np.array(landscape.mean, dtype=float)
    shown = landscape.arms[:MAX_ARMS]
    count = len(landscape.values) + 1 + len(shown)
    columns = min(COLUMNS, count)
    rows = ceil(count / columns)
    size = SIDE * columns + 0.3, SIDE * rows + 0.6
    figure = Figure(figsize=size, layout="constrained")
    axes = _subplots(figure, rows, columns, count)
    titled = {f"loss {name}": np.array(table, float) for name, table in landscape.values.items()}
    tables = {**titled, "mean of the losses": mean}
    for panel, (title, table) in zip(axes, tables.items(), strict=False):
        _draw_contours(panel, landscape, table, filled=True)
        panel.set_title(title)
    for panel, arm in zip(axes[len(tables) :], shown, strict=False):
        _draw_contours(panel, landscape, mean, filled=False)
        for trajectory in arm.trajectories:
            _draw_trajectory(panel, trajectory)
        panel.set_title(cut(arm.name))
    _add_legend(figure, len(shown), len(landscape.arms))
    return figure


def per_cent(axis: Any, metric: str) -> None:  # Any: matplotlib's XAxis or YAxis
    """Label an axis in per cent if the metric is a fraction."""
    if is_share(metric):
        axis.set_major_formatter(PercentFormatter(1.0))


def _subplots(figure: Figure, rows: int, columns: int, count: int) -> list[Axes]:
    """The first `count` panels of a grid; the others are removed."""
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return axes[:count]


def _draw_contours(panel: Axes, landscape: Landscape, table: np.ndarray, filled: bool) -> None:
    # levels at quantiles show valleys and plateaus alike
    known = np.ma.masked_invalid(table)
    ranks = np.linspace(0, 1, LEVELS)
    levels = np.unique(np.quantile(known.compressed(), ranks)) if known.count() else []
    grid = (landscape.x1, landscape.x2, known)
    if len(levels) >= 2 and filled:
        panel.contourf(*grid, levels=levels, cmap="cividis")
    elif len(levels) >= 2:
        panel.contour(*grid, levels=levels, colors="#999999", linewidths=0.5, linestyles="solid")
    x1, x2 = zip(*landscape.pareto, strict=True) if landscape.pareto else ((), ())
    panel.plot(x1, x2, color=PARETO, linewidth=3, alpha=0.8, solid_capstyle="round", zorder=2)
    panel.set_xlim(landscape.x1[0], landscape.x1[-1])
    panel.set_ylim(landscape.x2[0], landscape.x2[-1])
    panel.set_box_aspect(1)
    panel.set_xlabel("x1", labelpad=1)
    panel.set_ylabel("x2", labelpad=0)


def _draw_trajectory(panel: Axes, trajectory: Trajectory) -> None:
    """Draw from dark to light; with two points only, no line is drawn between them."""
    points = list(zip(trajectory.x1, trajectory.x2, strict=True))
    if len(points) > 2:
        lines = LineCollection(list(pairwise(points)), cmap="plasma", linewidths=1.6, zorder=3)
        lines.set_array(np.arange(len(points) - 1))
        panel.add_collection(lines, autolim=False)
    panel.plot(*points[0], "o", color=INK, markersize=4, zorder=4, clip_on=False)
    if len(points) > 1:
        panel.plot(*points[-1], **END_MARK, zorder=5)


def _add_legend(figure: Figure, shown: int, there: int) -> None:
    marks = [
        Line2D([], [], color=INK, marker="o", linestyle="", markersize=4, label="start"),
        Line2D([], [], **END_MARK, linestyle="", label="end"),
        Line2D([], [], color=PARETO, linewidth=3, label="Pareto set"),
    ]
    more = "" if shown == there else f"; the first {shown} of {there} arms"
    figure.legend(handles=marks, loc="outside upper left", ncols=3, fontsize=8)
    figure.supxlabel(f"arms over contours of the mean, from dark to light{more}", fontsize=8)
