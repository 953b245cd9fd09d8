"""Conflicts as figures for paper and slides: the map over time, weights and decrease by task."""

from collections.abc import Callable, Mapping
from math import ceil
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsurg.report.conflict_text import sharpest
from gradsurg.report.conflicts import ConflictSeries, Lines, pair_name
from gradsurg.report.panels import MAX_PANELS, cut, first_of, subplots
from gradsurg.report.study_report import StudyReport

# Okabe and Ito's, and dashes: told apart by all kinds of colour vision, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#3D3DB8", "#222222", "#767676")
DASHES = ("-", "--", ":", "-.")


def _map(report: StudyReport) -> Figure | None:
    """Pairs by intervals of steps, a panel for each arm, one scale for all."""
    shown, there = _shown(report)
    if not shown:
        return None
    rows = max(len(one.pairs) for one in shown)
    figure, panels = _grid(len(shown), 1.0 + 0.2 * max(rows, 3), 4.0)
    known = [np.abs(one.cosines[np.isfinite(one.cosines)]).max(initial=0.0) for one in shown]
    reach = min(1.0, max(0.2, ceil(10 * max(known)) / 10))
    image = None
    for panel, one in zip(panels, shown, strict=True):
        ends = (one.ends[0], one.ends[-1])
        image = panel.imshow(
            one.cosines,
            aspect="auto",
            interpolation="nearest",
            cmap="PuOr",
            vmin=-reach,
            vmax=reach,
            extent=(ends[0], max(ends[1], ends[0] + 1), len(one.pairs) - 0.5, -0.5),
        )
        names = [cut(pair_name(one.means.tasks, pair)) for pair in one.pairs]
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.set_title(_title(one))
    figure.tight_layout(rect=(0, 0.05, 0.93, 1))
    if image is not None:
        figure.colorbar(image, cax=figure.add_axes((0.945, 0.2, 0.012, 0.6)))
    said = f"step; cosine of the gradients of two tasks{first_of(len(shown), there)}"
    figure.supxlabel(said, fontsize=9, y=0.01)
    return figure


def _weights(report: StudyReport) -> Figure | None:
    return _curves(report, "weight", lambda one: one.weights)


def _decrease(report: StudyReport) -> Figure | None:
    return _curves(report, "decrease", lambda one: one.decrease)


CONFLICT_FIGURES: Mapping[str, Callable[[StudyReport], Figure | None]] = MappingProxyType(
    {"conflicts": _map, "conflict-weights": _weights, "conflict-decrease": _decrease}
)


def _curves(
    report: StudyReport, what: str, lines_of: Callable[[ConflictSeries], Lines | None]
) -> Figure | None:
    """A line for each task with its 95 % interval over seeds, a panel for each arm."""
    every = [one for one in sharpest(report.conflicts) if lines_of(one) is not None]
    shown = every[:MAX_PANELS]
    if not shown:
        return None
    figure, panels = _grid(len(shown), 2.1, 2.9)
    for panel, one in zip(panels, shown, strict=True):
        lines = lines_of(one)
        assert lines is not None
        _draw(panel, one, lines)
        panel.set_title(_title(one))
        panel.set_ylabel(what)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.supxlabel(f"step{first_of(len(shown), len(every))}", fontsize=9, y=0.01)
    return figure


def _draw(panel: Axes, one: ConflictSeries, lines: Lines) -> None:
    panel.axhline(0, color="#999999", linewidth=0.8, linestyle=":")
    for place, task in enumerate(one.shown):
        colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        panel.fill_between(
            one.ends, lines.low[place], lines.high[place], color=colour, alpha=0.1, linewidth=0
        )
        dot = "o" if len(one.ends) == 1 else ""
        style = {"color": colour, "linewidth": 1.3, "marker": dot, "markersize": 3.5}
        panel.plot(one.ends, lines.mean[place], dashes, label=one.means.tasks[task], **style)
    low, high = min(0.0, _end(lines.mean, np.min)), max(0.0, _end(lines.mean, np.max))
    room = 0.4 * (high - low or 1.0)  # an interval may take so much more at each end
    panel.set_ylim(low - room, high + room)
    panel.legend(fontsize=6.5, ncols=1 + (len(one.shown) > 4))


def _end(values: np.ndarray, of: Callable[[np.ndarray], float]) -> float:
    known = values[np.isfinite(values)]
    return float(of(known)) if len(known) else 0.0


def _shown(report: StudyReport) -> tuple[list[ConflictSeries], int]:
    """Those that have a panel, and of how many."""
    every = [one for one in sharpest(report.conflicts) if one.pairs]
    return every[:MAX_PANELS], len(every)


def _grid(count: int, height: float, width: float) -> tuple[Figure, list[Axes]]:
    """Panels in rows of at most three; no empty one is left."""
    columns = min(3, count)
    rows = ceil(count / columns)
    figure = Figure(figsize=(width * columns + 0.8, height * rows + 0.4))
    return figure, subplots(figure, rows, columns, count)


def _title(one: ConflictSeries) -> str:
    return f"{cut(one.name)}, n = {one.means.runs}"
