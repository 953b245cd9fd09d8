"""The figures of a study as SVG, PNG and PDF files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gradsurg.report.charts import CONFIG, PAPER, Panel, Spec, cut, rows_of
from gradsurg.report.conflicts import ConflictSeries, sharpest
from gradsurg.report.outcome_charts import (
    MAX_PAIRS,
    cost_panel,
    dose_groups,
    dose_panel,
    front_panel,
    of_metric,
    outcome_panel,
    reached_panel,
)
from gradsurg.report.pareto import Front
from gradsurg.report.study import StudyReport
from gradsurg.report.training_charts import (
    conflict_panel,
    conflict_reach,
    curve_data,
    curve_limits,
    curve_panel,
    last_step,
    norm_panel,
    site_panels,
    task_panel,
)
from gradsurg.report.tuning import tuning_panels
from gradsurg.report.wording import title

Item = TypeVar("Item")
MAX_PANELS = 12  # in a file
LOW = 110  # height of a panel in a file with many
SCALE = 1.5  # of a PNG


@dataclass(frozen=True)
class Figure:
    """Panels that make one file."""

    name: str
    panels: Sequence[Panel]
    columns: int
    title: str = ""
    note: str = ""


def write_figure(figure: Figure, folder: Path) -> Path:
    """Write a figure as SVG, PNG and PDF; return the PNG file."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(figure_spec(figure))
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    png = folder / f"{figure.name}.png"
    png.write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))
    return png


def figures(report: StudyReport) -> Iterator[Figure]:
    """The figures that are written as files."""
    if any(outcome.difference for outcome in report.outcomes):
        shown = list(report.metrics)[:4]
        panels = [outcome_panel(of_metric(report.outcomes, metric), metric) for metric in shown]
        heading = "Treated minus control, mean and 95 % paired t interval"
        yield Figure("outcome", panels, 2, heading)
    if reached := reached_panel(report.arms):
        yield Figure("reached", [reached], 1)
    if report.tunings:
        yield Figure("tuning", tuning_panels(report.tunings)[:MAX_PANELS], 2)
    yield from _curve_figure(report)
    maps = [one for one in report.maps if one.transform != "none"]
    if maps:
        runs = sorted({one.n for one in maps})
        n = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        heading = f"Effect on the gradients, means over all steps, n = {n} runs per arm"
        yield Figure("effects", site_panels(maps), 3, heading)
    changed = [norms for norms in report.norms if norms.after is not None]
    if changed:
        panels = [replace(norm_panel(norms), height=LOW) for norms in changed[:MAX_PANELS]]
        heading = "Gradient norms, all sites and measured steps"
        yield Figure("norms", panels, 3, heading, _first_of(len(panels), len(changed)))
    if report.doses and report.metrics:
        metric = next(iter(report.metrics))
        outcomes = of_metric(report.outcomes, metric)
        groups = dose_groups(report.doses)[:MAX_PANELS]
        panels = [dose_panel(group, outcomes, metric) for group in groups]
        yield Figure("doses", panels, 3, f"Difference in {title(metric)} over the dose")
    if report.costs:
        yield Figure("cost", [cost_panel(report.costs)], 1)
    yield from _conflict_figures(report.conflicts)
    for name, front in numbered("pareto", report.fronts).items():
        yield _front_figure(name, front)


def figure_spec(figure: Figure) -> Spec:
    """The Vega-Lite specification of a file, with its data."""
    datasets: dict[str, list[dict[str, object]]] = {}
    views = []
    for number, panel in enumerate(figure.panels):
        view = _bound(panel.view, panel.limits, str(number))
        views.append({**view, "title": panel.title, "width": panel.width, "height": panel.height})
        for name, columns in panel.data.items():
            datasets[f"{name}-{number}"] = rows_of(columns)
    heading = {
        "text": figure.title,
        "subtitle": figure.note.split("\n"),
        "fontSize": 13,
        "offset": 8,
    }
    return {
        "concat": views,
        "columns": min(figure.columns, len(views)),
        "spacing": 28,
        "padding": 14,
        "background": PAPER,
        "datasets": datasets,
        "config": {**CONFIG, "axis": {**CONFIG["axis"], "labelLimit": 220}},
        "resolve": {
            "scale": dict.fromkeys(
                ("color", "stroke", "fill", "strokeDash", "shape"), "independent"
            )
        },
        **({"title": heading} if figure.title else {}),
    }


def numbered(stem: str, items: Sequence[Item]) -> dict[str, Item]:
    """Names for several figures of one kind: `pareto`, `pareto-2` and so on."""
    return {f"{stem}-{place}" if place > 1 else stem: one for place, one in enumerate(items, 1)}


def _curve_figure(report: StudyReport) -> Iterator[Figure]:
    if not report.curves:
        return
    metric = report.curves[0].metric
    curves = curve_data(report, metric)
    last = last_step(curves)
    panels = [curve_panel(one, curve_limits(one.both), last) for one in curves[:MAX_PANELS]]
    panels = [replace(panel, height=LOW) for panel in panels]
    heading = f"{title(metric).capitalize()}: mean over seeds with its 95 % interval"
    if any(one.control for one in curves):
        heading += "; the control is dashed"
    yield Figure("curves", panels, 3, heading, _first_of(len(panels), len(curves)))


def _conflict_figures(series: Sequence[ConflictSeries]) -> Iterator[Figure]:
    every = [one for one in sharpest(series) if one.pairs]
    if every:
        shown = every[:MAX_PANELS]
        reach = conflict_reach(shown)
        panels = [conflict_panel(one, reach) for one in shown]
        heading = "Cosine of the gradients of two tasks"
        yield Figure("conflicts", panels, 3, heading, _first_of(len(shown), len(every)))
    for name, measure in (("conflict-weights", "weight"), ("conflict-decrease", "decrease")):
        known = [
            (one, lines)
            for one in sharpest(series)
            if (lines := one.weights if measure == "weight" else one.decrease) is not None
        ]
        panels = [task_panel(one, lines, measure) for one, lines in known[:MAX_PANELS]]
        if panels:
            heading = f"{measure.capitalize()} of each task, with its 95 % interval over seeds"
            yield Figure(name, panels, 3, heading, _first_of(len(panels), len(known)))


def _front_figure(name: str, front: Front) -> Figure:
    pairs = front.pairs[:MAX_PAIRS]
    of = "" if len(pairs) == len(front.pairs) else f", the first {len(pairs)} of {len(front.pairs)}"
    arms = [f"{place} {cut(mark.arm.name)}" for place, mark in enumerate(front.marks, 1)]
    lines = [", ".join(arms[k : k + 4]) for k in range(0, len(arms), 4)]
    note = "filled: no arm is better in one task and no worse in the others"
    return Figure(
        name,
        [front_panel(front, *pair) for pair in pairs],
        3,
        f"{front.task}, test {front.metric} of each task{of}".removeprefix(", "),
        "\n".join([note, *lines]),
    )


def _first_of(shown: int, there: int) -> str:
    return "" if shown == there else f"the first {shown} of {there} arms; the page has them all"


def _bound(node: Any, limits: Mapping[str, object], number: str) -> Any:  # Any: JSON
    """A view with its open numbers filled in and its datasets renamed to `name-number`."""
    if isinstance(node, list):
        return [_bound(item, limits, number) for item in node if not _is_invisible(item)]
    if not isinstance(node, dict):
        return node
    if node.keys() == {"expr"} and node["expr"] in limits:
        return limits[node["expr"]]
    if node.keys() == {"name"}:
        return {"name": f"{node['name']}-{number}"}
    return {key: _bound(item, limits, number) for key, item in node.items()}


def _is_invisible(node: Any) -> bool:  # Any: JSON
    """Whether it is a layer that only shows tooltips."""
    mark = node.get("mark") if isinstance(node, dict) else None
    return isinstance(mark, dict) and 0 in (mark.get("strokeOpacity"), mark.get("fillOpacity"))
