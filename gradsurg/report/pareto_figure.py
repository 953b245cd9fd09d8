"""The figure of trade-offs: tasks two by two, each run a dot, each arm a mean with intervals."""

from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsurg.report.palette import CONTROL, INK, TREATED
from gradsurg.report.panels import cut, per_cent, subplots
from gradsurg.report.pareto import Front, Mark, clusters, ends_of

MAX_PAIRS = 6
COLUMNS = 3


def draw_front(front: Front) -> Figure:
    """A panel for each two tasks; arms are numbered, and those that none dominates are filled."""
    pairs = front.pairs[:MAX_PAIRS]
    columns = min(COLUMNS, len(pairs))
    rows = ceil(len(pairs) / columns)
    names = [f"{1 + place}  {cut(mark.arm.name)}" for place, mark in enumerate(front.marks)]
    height = max(2.6 * rows, 0.17 * len(names)) + 0.6
    figure = Figure(figsize=(2.9 * columns + 2.6, height), layout="constrained")
    axes = subplots(figure, rows, columns, len(pairs))
    for panel, (first, second) in zip(axes, pairs, strict=True):
        _panel(panel, front, first, second)
    handles = [axes[0].plot([], [], " ")[0] for _ in names]
    figure.legend(handles, names, loc="outside right center", fontsize=8, handlelength=0)
    better = "lower left" if front.lower_is_better else "upper right"
    of = "" if len(pairs) == len(front.pairs) else f", the first {len(pairs)} of {len(front.pairs)}"
    figure.suptitle(f"{front.task}, test{of}: {better} is better", x=0.01, ha="left", fontsize=9)
    figure.supxlabel("filled: no arm is better in one task and no worse in the others", fontsize=8)
    return figure


def _panel(panel: Axes, front: Front, first: int, second: int) -> None:
    panel.set_xlabel(f"{front.metric} {front.names[first]}")
    panel.set_ylabel(f"{front.metric} {front.names[second]}")
    ends = [ends_of(front, task) for task in (first, second)]
    panel.set_xlim(*ends[0][:2])
    panel.set_ylim(*ends[1][:2])
    panel.set_xscale("log" if ends[0][2] else "linear")
    panel.set_yscale("log" if ends[1][2] else "linear")
    for axis in (panel.xaxis, panel.yaxis):
        per_cent(axis, front.metric)
    for mark in front.marks:
        _mark(panel, mark, first, second)
    offset = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8, "color": INK}
    for place, numbers in clusters(front, first, second):
        panel.annotate(numbers, place, **offset)


def _mark(panel: Axes, mark: Mark, first: int, second: int) -> None:
    colour = CONTROL if mark.arm.is_control else TREATED
    panel.plot(mark.values[first], mark.values[second], ".", color=colour, alpha=0.35, markersize=4)
    x, y = mark.means[first], mark.means[second]
    line = {"color": colour, "linewidth": 1.0, "alpha": 0.8}
    if x.low is not None and x.high is not None:
        panel.plot([x.low, x.high], [y.mean, y.mean], **line)
    if y.low is not None and y.high is not None:
        panel.plot([x.mean, x.mean], [y.low, y.high], **line)
    face = "white" if mark.beaten_by else colour
    panel.plot([x.mean], [y.mean], "o", color=colour, markerfacecolor=face, markersize=6)
