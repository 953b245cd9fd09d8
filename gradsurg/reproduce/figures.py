"""The figures of a claim: all its arms in one drawing."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from gradsurg.report.figures import STYLE
from gradsurg.report.grouping import Arm, group
from gradsurg.report.palette import ARMS
from gradsurg.report.reading import Found
from gradsurg.report.wording import is_share, title
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judging import outcome
from gradsurg.runs.store import METRICS, RunDirectory

FILE = "figure.png"


def draw(drawing: Drawing, runs: Sequence[Found], folder: Path) -> Path | None:
    """Draw the arms that these runs are of; the picture in `folder`, None without a number."""
    arms = [arm for arm in group(runs) if arm.whole]
    with mpl.rc_context(STYLE):
        figure = {"curves": _curves, "outcomes": _outcomes}[drawing.kind](arms, drawing.metric)
        if figure is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / FILE, dpi=130)
    return folder / FILE


def _curves(arms: Sequence[Arm], metric: str) -> Figure | None:
    """A line for each seed, in the colour of its arm."""
    figure = Figure(figsize=(6.4, 3.4))
    panel = figure.subplots()
    drawn = 0
    for place, arm in enumerate(arms):
        label = arm.name
        for run in arm.whole:
            rows = RunDirectory(run.path).read_rows(METRICS)
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                colour = ARMS[place % len(ARMS)]
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.1, label=label)
                label, drawn = "", drawn + 1
    if not drawn:
        return None
    panel.set_xlabel("step")
    panel.set_ylabel(title(metric))
    _per_cent(panel, metric, "y")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def _outcomes(arms: Sequence[Arm], metric: str) -> Figure | None:
    """A row for each arm: a dot for each seed, and their mean."""
    found = [[outcome(run, metric) for run in arm.whole] for arm in arms]
    values = [[value for value in own if value is not None] for own in found]
    if not any(values):
        return None
    figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(arms)))
    panel = figure.subplots()
    for row, own in enumerate(values):
        if own:
            colour = ARMS[row % len(ARMS)]
            panel.plot(own, [row] * len(own), "o", color=colour, markersize=5, alpha=0.6)
            panel.plot([sum(own) / len(own)], [row], "|", color=colour, markersize=16)
    panel.set_yticks(range(len(arms)), [arm.name for arm in arms])
    panel.set_ylim(len(arms) - 0.4, -0.6)
    panel.set_xlabel(f"{title(metric)}: each seed, and the mean")
    _per_cent(panel, metric, "x")
    figure.set_layout_engine("constrained")
    return figure


def _per_cent(panel: Axes, metric: str, which: str) -> None:
    if is_share(metric):
        axis = panel.xaxis if which == "x" else panel.yaxis
        axis.set_major_formatter(PercentFormatter(1.0))
