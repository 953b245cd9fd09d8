"""The figures of a study, as PNG and SVG, for paper and slides."""

import warnings
from collections.abc import Callable, Sequence
from math import ceil, log10
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from gradsurg.report.conflict_figures import CONFLICT_FIGURES
from gradsurg.report.curves import Curve
from gradsurg.report.effect_series import EffectMap
from gradsurg.report.outcome_figure import draw_outcome
from gradsurg.report.palette import CONTROL, INK, TREATED
from gradsurg.report.panels import MAX_PANELS, cut, first_of, per_cent, subplots
from gradsurg.report.pareto_figure import draw_front
from gradsurg.report.study_report import StudyReport
from gradsurg.report.trajectories import draw_trajectories
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
