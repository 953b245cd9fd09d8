"""The figures of a claim: all its arms in one drawing."""

from collections.abc import Sequence
from math import acos, degrees
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from gradsurg.report.load import Arm, Found, group
from gradsurg.report.pictures import ARMS, STYLE, per_cent
from gradsurg.report.wording import title
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judging import outcome
from gradsurg.reproduce.maps import draw_maps
from gradsurg.training.run_directory import EFFECTS, METRICS, RunDirectory

FILE = "figure.png"


def draw(drawing: Drawing, runs: Sequence[Found], folder: Path) -> Path | None:
    """Draw the arms that these runs are of; the picture in `folder`, None without a number."""
    arms = [arm for arm in group(runs) if arm.whole]
    with mpl.rc_context(STYLE):
        figure = DRAWN[drawing.kind](arms, drawing.metric)
        if figure is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / FILE, dpi=130)
    return folder / FILE


def _curves(arms: Sequence[Arm], metric: str) -> Figure | None:
    """A line for each seed, in the colour of its arm."""
    figure = Figure(figsize=(6.4, 3.6 + 0.18 * len(arms)))
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
    per_cent(panel.yaxis, metric)
    figure.legend(loc="outside lower center", fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def _outcomes(arms: Sequence[Arm], metric: str) -> Figure | None:
    """A row for each arm: a dot for each seed, and their mean."""
    found = [[outcome(run, metric) for run in arm.whole] for arm in arms]
    values = [[value for value in own if value is not None] for own in found]
    if not any(values):
        return None
    widest = max(len(arm.name) for arm in arms)
    figure = Figure(figsize=(3.8 + 0.07 * widest, 0.9 + 0.3 * len(arms)))
    panel = figure.subplots()
    for row, own in enumerate(values):
        if own:
            colour = ARMS[row % len(ARMS)]
            panel.plot(own, [row] * len(own), "o", color=colour, markersize=5, alpha=0.6)
            panel.plot([sum(own) / len(own)], [row], "|", color=colour, markersize=16)
    panel.set_yticks(range(len(arms)), [arm.name for arm in arms])
    panel.set_ylim(len(arms) - 0.4, -0.6)
    panel.set_xlabel(f"{title(metric)} of each seed, and the mean")
    per_cent(panel.xaxis, metric)
    figure.set_layout_engine("constrained")
    return figure


def _alignment(arms: Sequence[Arm], transform: str) -> Figure | None:
    """A panel for each arm that has the transform, a colour for each site, a line for each seed."""
    found = [
        (arm, [_angles(run, transform) for run in arm.whole]) for arm in arms if not arm.is_control
    ]
    drawn = [(arm, seeds) for arm, seeds in found if any(seeds)]
    if not drawn:
        return None
    figure = Figure(figsize=(0.6 + 3.2 * len(drawn), 3.4))
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for panel, (arm, seeds) in zip(panels, drawn, strict=True):
        for seed, own in enumerate(seeds):
            for place, (site, points) in enumerate(own.items()):
                label = "" if seed else site
                colour = ARMS[place % len(ARMS)]
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.1, label=label)
        panel.axhline(90, color="0.5", linewidth=0.8, linestyle="--")
        panel.set_xscale("log")
        panel.set_xlabel("step")
        panel.set_title(arm.name, fontsize=9)
    panels[0].set_ylabel("degrees between before and after")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def _angles(run: Found, transform: str) -> dict[str, list[tuple[int, float]]]:
    """Of each site, the angles over the steps; a gradient of zero has none."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in RunDirectory(run.path).read_rows(EFFECTS):
        cosine = row.get("cosine")
        if row["transform"] == transform and cosine is not None and row["norm_before"]:
            angle = degrees(acos(max(-1.0, min(1.0, cosine))))
            found.setdefault(row["site"], []).append((row["step"], angle))
    return found


DRAWN = {"curves": _curves, "outcomes": _outcomes, "maps": draw_maps, "alignment": _alignment}
