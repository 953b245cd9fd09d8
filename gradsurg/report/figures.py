"""The figures of a study, as PNG and SVG, for paper and slides."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log10
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from gradsurg.report.compare import CLEAR, Outcome
from gradsurg.report.conflicts import ConflictSeries, Lines, pair_name, sharpest
from gradsurg.report.pareto import Front, Mark, clusters, ends_of
from gradsurg.report.pictures import (
    CONTROL,
    INK,
    MAX_PANELS,
    TREATED,
    UNCLEAR,
    cut,
    draw_trajectories,
    first_of,
    per_cent,
    subplots,
)
from gradsurg.report.series import Curve, EffectMap
from gradsurg.report.study import StudyReport
from gradsurg.report.wording import title

STYLE: dict[Any, Any] = {  # Any: matplotlib has a type for its keys, and no name for it
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "gradsurg",  # the same data, the same file
    "svg.fonttype": "none",
}
Drawn = TypeVar("Drawn")


def write_figures(report: StudyReport, folder: Path) -> list[Path]:
    """Each figure that there are numbers for; their PNG files."""
    drawings: dict[str, Callable[[StudyReport], Figure | None]] = {
        "outcome": draw_outcome,
        "curves": _curves,
        "effects": _effects,
        "norms": _norms,
        "doses": _doses,
        "cost": _cost,
        **CONFLICT_FIGURES,
    }
    for name, front in numbered("pareto", report.fronts).items():
        drawings[name] = lambda _, front=front: draw_front(front)
    for name, ground in numbered("trajectories", report.landscapes).items():
        drawings[name] = lambda _, ground=ground: draw_trajectories(ground)
    written = []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # of how a figure looks, with names too long or in another script: nothing a user can mend
        warnings.filterwarnings("ignore", "No artists|Tight layout|Glyph", UserWarning)
        for name, draw in drawings.items():
            figure = draw(report)
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=130)
            written.append(folder / f"{name}.png")
    return written


def numbered(stem: str, figures: Sequence[Drawn]) -> dict[str, Drawn]:
    """The names of several figures of one kind: `pareto`, `pareto-2` and so on."""
    return {f"{stem}-{place}" if place > 1 else stem: one for place, one in enumerate(figures, 1)}


def _curves(report: StudyReport) -> Figure | None:
    """A panel for each treated arm, its control behind it."""
    if not report.curves:
        return None
    metric = report.curves[0].metric
    own = {curve.arm.name: curve for curve in report.curves if curve.metric == metric}
    treated = [curve for curve in own.values() if not curve.arm.is_control]
    shown = (treated or list(own.values()))[:MAX_PANELS]
    figure, panels = _grid(len(shown), 2.0)
    homes = {run.name: arm.name for arm in report.arms for run in arm.runs}
    for panel, curve in zip(panels, shown, strict=True):
        behind = next((homes[run.control] for run in curve.arm.runs if run.control in homes), "")
        if behind in own:
            _line(panel, own[behind], CONTROL, "control")
        _line(panel, curve, TREATED, "treated" if behind else "")
        panel.set_title(f"{cut(curve.arm.name)}, n = {max(curve.n)}")
        per_cent(panel.yaxis, metric)
    panels[0].set_ylabel(title(metric))
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(fontsize=8)
    figure.supxlabel(f"step{first_of(len(shown), len(treated or own))}", fontsize=9, y=0.01)
    return figure


def _line(panel: Axes, curve: Curve, colour: str, label: str) -> None:
    nan = float("nan")
    low, high, mean = (
        [nan if value is None else value for value in values]
        for values in (curve.low, curve.high, curve.mean)
    )
    panel.fill_between(curve.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    dashes = "--" if colour == CONTROL else "-"
    panel.plot(curve.steps, mean, dashes, color=colour, linewidth=1.4, label=label)
    there = [False, *(value is not None for value in curve.mean), False]
    lone = [k for k in range(len(mean)) if there[k : k + 3] == [False, True, False]]
    if lone:  # a line does not show a point without neighbours
        steps, values = [curve.steps[k] for k in lone], [mean[k] for k in lone]
        panel.plot(steps, values, "o", color=colour, markersize=3.5)


def _effects(report: StudyReport) -> Figure | None:
    """Cosine, norm ratio and fraction changed: sites by arms, means over the training."""
    maps = [found for found in report.maps if found.transform != "none"]
    if not maps:
        return None
    sites = list(dict.fromkeys(site for found in maps for site in found.sites))
    names = [_of_map(found) for found in maps]
    width = 2.4 + 3 * (0.6 + 0.3 * len(maps))
    figure = Figure(figsize=(min(width, 24), 1.6 + 0.22 * len(sites) + 0.02 * len(names[0])))
    axes = figure.subplots(1, 3, sharey=True)
    titles = {"cosine": "cosine", "ratio": "log2 norm ratio", "changed": "fraction changed"}
    scales = (("cosine", "cividis"), ("ratio", "PuOr_r"), ("changed", "cividis"))
    for panel, (measure, colours) in zip(axes, scales, strict=True):
        table = [[_at(found, site, measure) for found in maps] for site in sites]
        known = [value for row in table for value in row if value == value]
        limits = {"vmin": min([0.0, *known]), "vmax": 1.0}
        if measure == "ratio":
            table = [[_log2(value) for value in row] for row in table]
            limits = {"vmin": -3, "vmax": 3}
        image = panel.imshow(table, aspect="auto", cmap=colours, **limits)
        panel.set_xticks(range(len(maps)), names, rotation=45, ha="right", rotation_mode="anchor")
        panel.set_title(titles[measure])
        figure.colorbar(image, ax=panel, fraction=0.08, pad=0.03)
    axes[0].set_yticks(range(len(sites)), [cut(site) for site in sites])
    runs = sorted({found.n for found in maps})
    count = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    figure.suptitle(f"Means over all steps, n = {count} runs an arm", x=0.01, ha="left", fontsize=9)
    figure.tight_layout()
    return figure


def _of_map(found: EffectMap) -> str:
    name = found.arm.name
    return cut(name if found.transform == name.split(" · ")[0] else f"{name}: {found.transform}")


def _at(found: EffectMap, site: str, measure: str) -> float:
    if site not in found.sites:
        return float("nan")
    value = found.overall[measure][found.sites.index(site)]
    return float("nan") if value is None else value


def _log2(value: float) -> float:
    return log10(value) / log10(2) if value > 0 else (-30.0 if value == 0 else value)


def _norms(report: StudyReport) -> Figure | None:
    """Gradient norms before and after, a panel for each arm and transform."""
    every = [found for found in report.norms if found.after is not None]
    shown = every[:MAX_PANELS]
    if not shown:
        return None
    figure, panels = _grid(len(shown), 1.7)
    for panel, found in zip(panels, shown, strict=True):
        after = found.after or []
        width = (found.high - found.low) / len(found.before)
        edges = [10 ** (found.low + width * place) for place in range(len(found.before) + 1)]
        panel.stairs(after, edges, fill=True, color=TREATED, alpha=0.5, label="after")
        panel.stairs(found.before, edges, color=CONTROL, linewidth=1.2, label="before")
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, 0))
        panel.set_title(f"{cut(found.arm.name)}, n = {found.n}")
        if found.zero_after:
            corner = {"transform": panel.transAxes, "va": "top", "fontsize": 7}
            panel.text(0.02, 0.98, f"{found.zero_after:.0%} are zero after", **corner)
    panels[0].legend(fontsize=8)
    told = f"gradient norm, all sites and measured steps{first_of(len(shown), len(every))}"
    figure.supxlabel(told, fontsize=9, y=0.01)
    return figure


def _doses(report: StudyReport) -> Figure | None:
    """The difference over the one number in which arms differ."""
    if not report.doses or not report.metrics:
        return None
    metric = next(iter(report.metrics))
    own = {o.arm.name: o for o in report.outcomes if o.metric == metric}
    figure, panels = _grid(len(report.doses[:MAX_PANELS]), 2.2)
    for panel, doses in zip(panels, report.doses, strict=False):
        panel.axhline(0, color="#999999", linewidth=0.8, linestyle=":")
        points = [
            (x, own[arm.name].difference) for x, arm in zip(doses.doses, doses.arms, strict=True)
        ]
        known = [(x, found) for x, found in points if found is not None]
        panel.plot([x for x, _ in known], [found.mean for _, found in known], "o-", color=TREATED)
        for x, found in known:
            if found.low is not None and found.high is not None:
                panel.plot([x, x], [found.low, found.high], color=TREATED, linewidth=1.4)
        if min(doses.doses) > 0 and max(doses.doses) >= 10 * min(doses.doses):
            panel.set_xscale("log")
        counts = sorted({found.n for _, found in known})
        several = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{(counts or [0])[0]}"
        panel.set_title(f"{cut(doses.name)}, n = {several}")
        panel.set_xlabel(doses.key.rpartition(".")[2])
        per_cent(panel.yaxis, metric)
    panels[0].set_ylabel(f"difference in {title(metric)}")
    return figure


def _cost(report: StudyReport) -> Figure | None:
    """How many times as long a step takes as the control's."""
    if not report.costs:
        return None
    figure = Figure(figsize=(5.6, 0.9 + 0.27 * len(report.costs)))
    panel = figure.subplots()
    panel.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
    for row, cost in enumerate(report.costs):
        ratios = sorted(cost.ratios)
        panel.plot([ratios[0], ratios[-1]], [row, row], color=TREATED, linewidth=1.6)
        panel.plot(ratios, [row] * len(ratios), "|", color=TREATED, markersize=5)
    names = [f"{cut(cost.arm.name)}  (n = {len(cost.ratios)})" for cost in report.costs]
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlabel("step time over the control's, each pair")
    figure.tight_layout()
    return figure


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels in rows of at most four; no empty one is left."""
    columns = min(4, count)
    rows = ceil(count / columns)
    wide, high = 2.7 * columns + 0.5, height * rows + 0.4
    figure = Figure(figsize=(wide, high))
    # margins in inches: measuring every label takes longer than drawing
    figure.subplots_adjust(
        left=0.75 / wide,
        right=1 - 0.15 / wide,
        top=1 - 0.3 / high,
        bottom=0.55 / high,
        wspace=0.38,
        hspace=0.75 / (height - 0.75),
    )
    return figure, subplots(figure, rows, columns, count)


def draw_outcome(report: StudyReport) -> Figure | None:
    """The forest plot, a panel for each metric; arms without a pair are named, with no mark."""
    if not any(outcome.difference for outcome in report.outcomes):
        return None
    shown = list(report.metrics)[:4]
    first = [outcome for outcome in report.outcomes if outcome.metric == shown[0]]
    figure = Figure(figsize=(2.2 + 2.4 * len(shown), 0.9 + 0.27 * len(first)))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, metric in zip(axes, shown, strict=True):
        own = [outcome for outcome in report.outcomes if outcome.metric == metric]
        panel.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        for row, outcome in enumerate(own):
            _mark(panel, outcome, row)
        panel.set_xlim(*_limits(own))
        for row, outcome in enumerate(own):
            _arrows(panel, outcome, row)
        per_cent(panel.xaxis, metric)
        panel.set_xlabel(f"difference in {title(metric)}")
        panel.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(first)), [_named(outcome) for outcome in first])
    axes[0].set_ylim(len(first) - 0.4, -0.6)
    figure.suptitle(
        "Treated minus control, mean and 95 % paired t interval", x=0.01, ha="left", fontsize=9
    )
    figure.tight_layout()
    return figure


def _mark(panel: Axes, outcome: Outcome, row: float) -> None:
    found = outcome.difference
    if found is None:
        return
    clear = outcome.reading in CLEAR
    colour = TREATED if clear else UNCLEAR
    if found.low is not None and found.high is not None:
        panel.plot([found.low, found.high], [row, row], color=colour, linewidth=1.6)
    face = colour if clear else "white"
    panel.plot([found.mean], [row], "o", color=colour, markerfacecolor=face, markersize=4.5)


def _limits(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Room for all means and seeds; an interval may take half as much again at each end."""
    found = [outcome.difference for outcome in outcomes if outcome.difference]
    seen = [0.0, *(value for outcome in outcomes for value in outcome.differences)]
    ends = [end for one in found for end in (one.low, one.high) if end is not None]
    room = (max(seen) - min(seen)) / 2
    low = max(min(seen) - room, min([*ends, *seen]))
    high = min(max(seen) + room, max([*ends, *seen]))
    pad = 0.04 * ((high - low) or 1)
    return low - pad, high + pad


def _arrows(panel: Axes, outcome: Outcome, row: float) -> None:
    """At the edge, where an interval goes on."""
    found, (left, right) = outcome.difference, panel.get_xlim()
    if found is None or found.low is None or found.high is None:
        return
    colour = TREATED if outcome.reading in CLEAR else UNCLEAR
    inset = 0.015 * (right - left)
    ends = ((found.low < left, left + inset, "<"), (found.high > right, right - inset, ">"))
    for goes_on, edge, sign in ends:
        if goes_on:
            panel.plot([edge], [row], sign, color=colour, markersize=5)


def _named(outcome: Outcome) -> str:
    number = outcome.difference.n if outcome.difference else 0
    of = "" if number == outcome.planned else f" of {outcome.planned}"
    return f"{cut(outcome.arm.name)}  (n = {number}{of})"


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
        _mark_pareto_figure(panel, mark, first, second)
    offset = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8, "color": INK}
    for place, numbers in clusters(front, first, second):
        panel.annotate(numbers, place, **offset)


def _mark_pareto_figure(panel: Axes, mark: Mark, first: int, second: int) -> None:
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


# Okabe and Ito's, and dashes: told apart by all kinds of colour vision, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#3D3DB8", "#222222", "#767676")
DASHES = ("-", "--", ":", "-.")


def _map(report: StudyReport) -> Figure | None:
    """Pairs by intervals of steps, a panel for each arm, one scale for all."""
    shown, there = _shown(report)
    if not shown:
        return None
    rows = max(len(one.pairs) for one in shown)
    figure, panels = _grid_conflict_figures(len(shown), 1.0 + 0.2 * max(rows, 3), 4.0)
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
    return _curves_conflict_figures(report, "weight", lambda one: one.weights)


def _decrease(report: StudyReport) -> Figure | None:
    return _curves_conflict_figures(report, "decrease", lambda one: one.decrease)


CONFLICT_FIGURES: Mapping[str, Callable[[StudyReport], Figure | None]] = MappingProxyType(
    {"conflicts": _map, "conflict-weights": _weights, "conflict-decrease": _decrease}
)


def _curves_conflict_figures(
    report: StudyReport, what: str, lines_of: Callable[[ConflictSeries], Lines | None]
) -> Figure | None:
    """A line for each task with its 95 % interval over seeds, a panel for each arm."""
    every = [one for one in sharpest(report.conflicts) if lines_of(one) is not None]
    shown = every[:MAX_PANELS]
    if not shown:
        return None
    figure, panels = _grid_conflict_figures(len(shown), 2.1, 2.9)
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


def _grid_conflict_figures(count: int, height: float, width: float) -> tuple[Figure, list[Axes]]:
    """Panels in rows of at most three; no empty one is left."""
    columns = min(3, count)
    rows = ceil(count / columns)
    figure = Figure(figsize=(width * columns + 0.8, height * rows + 0.4))
    return figure, subplots(figure, rows, columns, count)


def _title(one: ConflictSeries) -> str:
    return f"{cut(one.name)}, n = {one.means.runs}"
