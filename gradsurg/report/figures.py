"""The charts of a study: each is described once, with Altair, for the page and for files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, floor, isfinite, log2, log10
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import altair as alt

from gradsurg.report.compare import CLEAR, Cost, Doses, Outcome
from gradsurg.report.conflicts import ConflictSeries, Lines, pair_name, sharpest
from gradsurg.report.pareto import Front, clusters, ends_of
from gradsurg.report.series import MEASURES, Curve, EffectMap, Norms
from gradsurg.report.study import StudyReport
from gradsurg.report.wording import amount, count, interval, is_share, title, value

Spec = dict[str, Any]  # Any: Vega-Lite as JSON
Columns = dict[str, list[Any]]  # Any: numbers and texts, None where one is missing
Item = TypeVar("Item")

# Okabe and Ito: distinct for all kinds of colour vision, and in grey.
TREATED, CONTROL, UNCLEAR, BAD = "#0072b2", "#d55e00", "#767676", "#a3261d"
INK, SOFT, LINE, GRID, PAPER = "#1b1d22", "#565b66", "#b9b6af", "#eceae6", "#ffffff"
TASKS = (TREATED, CONTROL, "#009e73", "#cc79a7", "#8c6d00", "#3d3db8", "#222222", UNCLEAR)
DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3])
DARK = {
    TREATED: "#74b9f5",
    CONTROL: "#f0a860",
    UNCLEAR: "#a4a9b4",
    BAD: "#ff9d92",
    INK: "#e9e8e4",
    SOFT: "#a9aeb9",
    LINE: "#4a505c",
    GRID: "#282c34",
    PAPER: "#14161a",
    "#009e73": "#4fd1a5",
    "#cc79a7": "#ef9bc9",
    "#8c6d00": "#e6d36a",
    "#3d3db8": "#a9a6ff",
    "#222222": "#f4f4f2",
}
"""The colours of the dark theme, by those of the light one."""

CONFIG: Spec = {
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "labelColor": SOFT,
        "titleColor": SOFT,
        "gridColor": GRID,
        "domainColor": LINE,
        "tickColor": LINE,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelLimit": 260,
        "labelPadding": 5,
    },
    "legend": {
        "labelColor": SOFT,
        "titleColor": SOFT,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "labelLimit": 260,
        "titleLimit": 320,
    },
    "title": {"color": INK, "subtitleColor": SOFT, "anchor": "start", "fontSize": 12},
}

MAX_PANELS = 12  # in a file
MAX_PAIRS = 6  # of tasks with a trade-off
MAX_NAME = 34
ROW = 24  # height of an arm, in pixels
SCALE = 2  # of a PNG


@dataclass(frozen=True)
class Panel:
    """One chart: a view without data, its data, and the numbers that the view leaves open.

    A view is Vega-Lite; it refers to its data by name and holds `{"expr": key}` for each key of
    `limits`. Panels of one kind share their view. `summary` is the text for screen readers.
    """

    title: str
    summary: str
    view: Spec
    data: Mapping[str, Columns]
    limits: Mapping[str, object] = field(default_factory=dict)
    width: int = 250  # in a file; on the page a chart is as wide as its place
    height: int = 170


@dataclass(frozen=True)
class Figure:
    """Panels that make one file."""

    name: str
    panels: Sequence[Panel]
    columns: int
    title: str = ""
    note: str = ""


def write_figures(report: StudyReport, folder: Path) -> list[Path]:
    """Write each figure that has data as SVG, PNG and PDF; return the PNG files."""
    return [write_figure(figure, folder) for figure in figures(report)]


def write_figure(figure: Figure, folder: Path) -> Path:
    """Write a figure as SVG, PNG and PDF; return the PNG file."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(figure_spec(figure))
    (folder / f"{figure.name}.svg").write_text(svg)
    (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    png = folder / f"{figure.name}.png"
    png.write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))
    return png


def figures(report: StudyReport) -> Iterator[Figure]:
    """The figures that are written as files."""
    if any(outcome.difference for outcome in report.outcomes):
        shown = list(report.metrics)[:4]
        panels = [outcome_panel(of_metric(report.outcomes, metric), metric) for metric in shown]
        said = "Treated minus control, mean and 95 % paired t interval"
        yield Figure("outcome", panels, 2, said)
    yield from _curve_figure(report)
    maps = [one for one in report.maps if one.transform != "none"]
    if maps:
        runs = sorted({one.n for one in maps})
        n = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        said = f"Effect on the gradients, means over all steps, n = {n} runs per arm"
        yield Figure("effects", site_panels(maps), 3, said)
    changed = [norms for norms in report.norms if norms.after is not None]
    if changed:
        panels = [norm_panel(norms) for norms in changed[:MAX_PANELS]]
        said = "Gradient norms, all sites and measured steps"
        yield Figure("norms", panels, 3, said, _first_of(len(panels), len(changed)))
    if report.doses and report.metrics:
        metric = next(iter(report.metrics))
        own = of_metric(report.outcomes, metric)
        panels = [dose_panel(doses, own, metric) for doses in report.doses[:MAX_PANELS]]
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
        "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}},
        **({"title": heading} if figure.title else {}),
    }


def numbered(stem: str, items: Sequence[Item]) -> dict[str, Item]:
    """Names for several figures of one kind: `pareto`, `pareto-2` and so on."""
    return {f"{stem}-{place}" if place > 1 else stem: one for place, one in enumerate(items, 1)}


def of_metric(outcomes: Sequence[Outcome], metric: str) -> list[Outcome]:
    """The outcomes of one metric, in their order."""
    return [outcome for outcome in outcomes if outcome.metric == metric]


def rows_of(columns: Columns) -> list[dict[str, object]]:
    """A table as a list of its rows."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def short(number: float | None, digits: int = 4) -> float | None:
    """A number with few digits, None for NaN and infinity; whole numbers become int."""
    if number is None or not isfinite(number):
        return None
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


# Outcome, doses, cost ------------------------------------------------------------------------


def outcome_panel(
    outcomes: Sequence[Outcome], metric: str, name: Callable[[Outcome], str] | None = None
) -> Panel:
    """The forest plot of a metric: difference, interval and seeds of each arm, or link."""
    label = name or _arm_with_n
    low, high = limits_of(outcomes)
    data = _differences(outcomes, label, low, high)
    said = [
        f"{label(one)}: {amount(metric, one.difference.mean)}" for one in outcomes if one.difference
    ]
    return Panel(
        title(metric),
        f"Difference in {title(metric)} with 95 % intervals. {'; '.join(said)}",
        _forest_view(title(metric), is_share(metric)),
        data,
        {"low": low, "high": high},
        width=260,
        height=ROW * len(outcomes),
    )


def limits_of(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Limits with room for all means and seeds.

    An interval may take half of their span more at each end; beyond that it is cut.
    """
    found = [outcome.difference for outcome in outcomes if outcome.difference]
    seen = [0.0, *(value for outcome in outcomes for value in outcome.differences)]
    ends = [end for one in found for end in (one.low, one.high) if end is not None]
    room = (max(seen) - min(seen)) / 2
    low = max(min(seen) - room, min([*ends, *seen]))
    high = min(max(seen) + room, max([*ends, *seen]))
    pad = 0.04 * ((high - low) or 1)
    return low - pad, high + pad


def _differences(
    outcomes: Sequence[Outcome], label: Callable[[Outcome], str], low: float, high: float
) -> dict[str, Columns]:
    arms: Columns = {key: [] for key in ("arm", "mean", "from", "to", "clear", "said", "interval")}
    seeds: Columns = {"arm": [], "seed": [], "difference": []}
    cuts: Columns = {"arm": [], "at": [], "shape": [], "clear": []}
    for outcome in outcomes:
        name, found = label(outcome), outcome.difference
        clear = outcome.reading in CLEAR
        ends = (found.low, found.high) if found else (None, None)
        row = {
            "arm": name,
            "mean": short(found.mean, 6) if found else None,
            "from": None if ends[0] is None else short(max(low, ends[0]), 6),
            "to": None if ends[1] is None else short(min(high, ends[1]), 6),
            "clear": clear,
            "said": amount(outcome.metric, found.mean) if found else "nothing to compare",
            "interval": interval(outcome.metric, found) if found else "",
        }
        for key, cell in row.items():
            arms[key].append(cell)
        for end, limit, shape in (
            (ends[0], low, "triangle-left"),
            (ends[1], high, "triangle-right"),
        ):
            if end is not None and (end < low or end > high):
                for key, cell in zip(cuts, (name, limit, shape, clear), strict=True):
                    cuts[key].append(cell)
        for seed, difference in zip(outcome.seeds, outcome.differences, strict=True):
            for key, cell in zip(seeds, (name, seed, short(difference, 6)), strict=True):
                seeds[key].append(cell)
    return {"arms": arms, "seeds": seeds, "cuts": cuts}


@cache
def _forest_view(metric: str, share: bool) -> Spec:
    arms, seeds, cuts = (alt.Chart(alt.NamedData(name)) for name in ("arms", "seeds", "cuts"))
    scale = alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False, zero=False)
    axis = alt.Axis(format="+.2~%" if share else "+.3~g", tickCount=4, labelOverlap=True)
    x = {"scale": scale, "axis": axis, "title": f"difference in {metric}"}
    y = alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False))
    color = alt.condition("datum.clear", alt.value(TREATED), alt.value(UNCLEAR))
    tips = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("said:N", title="difference"),
        alt.Tooltip("interval:N", title="95 % interval"),
    ]
    layers = alt.layer(
        arms.mark_rule(strokeWidth=2).encode(x=alt.X("from:Q", **x), x2="to:Q", y=y, color=color),
        _zero("x"),
        seeds.mark_tick(thickness=1.2, size=8, yOffset=7, color=SOFT).encode(
            x=alt.X("difference:Q", **x), y=y, tooltip=["arm:N", "seed:Q", "difference:Q"]
        ),
        cuts.mark_point(size=45, filled=True, opacity=1).encode(
            x=alt.X("at:Q", **x), y=y, shape=alt.Shape("shape:N", scale=None), color=color
        ),
        arms.mark_point(size=60, opacity=1, strokeWidth=2).encode(
            x=alt.X("mean:Q", **x),
            y=y,
            stroke=color,
            fill=alt.condition("datum.clear", alt.value(TREATED), alt.value(PAPER)),
            tooltip=tips,
        ),
    )
    return _spec(layers)


def dose_panel(doses: Doses, outcomes: Sequence[Outcome], metric: str) -> Panel:
    """The difference to the control over the one number in which arms differ."""
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    own = [by_name[arm.name] for arm in doses.arms if arm.name in by_name]
    places = {arm.name: dose for dose, arm in zip(doses.doses, doses.arms, strict=True)}
    low, high = limits_of(own)
    arms = _differences(own, lambda one: one.arm.name, low, high)["arms"]
    arms["dose"] = [places[name] for name in arms["arm"]]
    key = doses.key.rpartition(".")[2]
    by_log = min(doses.doses) > 0 and max(doses.doses) >= 10 * min(doses.doses)
    seeds = sorted({one.difference.n if one.difference else 0 for one in own}) or [0]
    several = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    said = "; ".join(f"{places[o.arm.name]:g}: {_said(o)}" for o in own)
    return Panel(
        f"{cut(doses.name)}, n = {several}",
        f"{doses.name}: difference in {title(metric)} over {doses.key}. {said}",
        _dose_view(title(metric), is_share(metric), key, by_log),
        {"arms": arms},
        {"low": low, "high": high},
    )


def _said(outcome: Outcome) -> str:
    if outcome.difference is None:
        return "nothing to compare"
    return amount(outcome.metric, outcome.difference.mean)


@cache
def _dose_view(metric: str, share: bool, key: str, by_log: bool) -> Spec:
    arms = alt.Chart(alt.NamedData("arms"))
    x = alt.X(
        "dose:Q",
        scale=alt.Scale(type="log" if by_log else "linear", zero=False, padding=12, nice=False),
        axis=alt.Axis(format="~g", tickCount=5, grid=False, labelOverlap=True),
        title=key + (" (log scale)" if by_log else ""),
    )
    y = {
        "scale": alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False),
        "axis": alt.Axis(format="+.2~%" if share else "+.3~g", tickCount=5),
        "title": f"difference in {metric}",
    }
    color = alt.condition("datum.clear", alt.value(TREATED), alt.value(UNCLEAR))
    layers = alt.layer(
        arms.mark_line(color=TREATED, strokeWidth=2).encode(x=x, y=alt.Y("mean:Q", **y)),
        _zero("y"),
        arms.mark_rule(strokeWidth=2).encode(x=x, y=alt.Y("from:Q", **y), y2="to:Q", color=color),
        arms.mark_point(size=60, opacity=1, strokeWidth=2).encode(
            x=x,
            y=alt.Y("mean:Q", **y),
            stroke=color,
            fill=alt.condition("datum.clear", alt.value(TREATED), alt.value(PAPER)),
            tooltip=[
                alt.Tooltip("dose:Q", title=key),
                alt.Tooltip("said:N", title="difference"),
                alt.Tooltip("interval:N", title="95 % interval"),
            ],
        ),
    )
    return _spec(layers)


def cost_panel(costs: Sequence[Cost]) -> Panel:
    """Step time over the control's: each pair, their range and their median."""
    names = [f"{cut(cost.arm.name)} (n = {len(cost.ratios)})" for cost in costs]
    arms = {
        "arm": names,
        "ratio": [short(median(cost.ratios)) for cost in costs],
        "low": [short(min(cost.ratios)) for cost in costs],
        "high": [short(max(cost.ratios)) for cost in costs],
    }
    pairs = [
        (name, ratio) for name, cost in zip(names, costs, strict=True) for ratio in cost.ratios
    ]
    data = {
        "arms": arms,
        "pairs": {"arm": [n for n, _ in pairs], "ratio": [short(r) for _, r in pairs]},
    }
    said = "; ".join(f"{name}: {one:g}" for name, one in zip(names, arms["ratio"], strict=True))
    return Panel(
        "",
        f"Step time over the control's. {said}",
        _cost_view(),
        data,
        width=340,
        height=ROW * len(costs),
    )


@cache
def _cost_view() -> Spec:
    arms, pairs = alt.Chart(alt.NamedData("arms")), alt.Chart(alt.NamedData("pairs"))
    x = {
        "scale": alt.Scale(zero=False),
        "axis": alt.Axis(format="~g", labelExpr=r"datum.label + '\u00d7'", tickCount=5),
        "title": "step time over the control's",
    }
    y = alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False))
    tips = ["arm:N", alt.Tooltip("ratio:Q", title="median"), "low:Q", "high:Q"]
    layers = alt.layer(
        arms.mark_rule(strokeWidth=2, color=TREATED).encode(
            x=alt.X("low:Q", **x), x2="high:Q", y=y
        ),
        _zero("x", at=1),
        pairs.mark_tick(thickness=1.2, size=9, color=TREATED).encode(x=alt.X("ratio:Q", **x), y=y),
        arms.mark_point(size=60, filled=True, opacity=1, color=TREATED).encode(
            x=alt.X("ratio:Q", **x), y=y, tooltip=tips
        ),
    )
    return _spec(layers)


# Learning curves -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveData:
    """A learning curve with that of its control, if there is one."""

    curve: Curve
    control: Curve | None
    data: Mapping[str, Columns]

    @property
    def both(self) -> list[Curve]:
        return [self.curve, *([self.control] if self.control else [])]


def curve_data(report: StudyReport, metric: str) -> list[CurveData]:
    """The curves of a metric: the treated arms with their controls, or all if none is treated."""
    own = {curve.arm.name: curve for curve in report.curves if curve.metric == metric}
    treated = [curve for curve in own.values() if not curve.arm.is_control]
    homes = {run.name: arm.name for arm in report.arms for run in arm.runs}
    means = {name: _mean_columns(curve) for name, curve in own.items()}
    empty: Columns = {key: [] for key in ("step", "mean", "low", "high", "n")}
    found = []
    for curve in treated or own.values():
        behind = next((homes[run.control] for run in curve.arm.runs if run.control in homes), "")
        control = own.get(behind)
        lone = _lone_points(curve, False), _lone_points(control, True) if control else []
        points = [point for part in lone for point in part]
        data = {
            "mean": means[curve.arm.name],
            "control": means[behind] if control else empty,
            "seeds": _seed_columns(curve),
            "points": {
                key: [point[place] for point in points]
                for place, key in enumerate(("step", "mean", "control"))
            },
        }
        found.append(CurveData(curve, control, data))
    return found


def curve_panel(
    one: CurveData, limits: tuple[float, float], last: int, by_log: bool = False
) -> Panel:
    """The learning curve of an arm: mean, interval and single seeds, its control behind."""
    curve, metric = one.curve, one.curve.metric
    ends = [f"last mean {value(metric, _last(curve.mean))}"]
    if one.control:
        ends.append(f"control {value(metric, _last(one.control.mean))}")
    return Panel(
        f"{cut(curve.arm.name)}, {n_of(curve)}",
        f"{title(metric)} of {curve.arm.name} over steps ({n_of(curve)}), {'; '.join(ends)}",
        _curve_view(title(metric), is_share(metric), by_log),
        one.data,
        {"low": limits[0], "high": limits[1], "last": last},
    )


def curve_limits(curves: Sequence[Curve], by_log: bool = False) -> tuple[float, float]:
    """Limits of an axis for some curves of one metric.

    A tenth of the means at each end may leave it: one arm that explodes would flatten all others.
    """
    metric = curves[0].metric
    known = sorted(v for curve in curves for v in _known(curve.mean, by_log))
    if not known:
        values = [v for curve in curves for run in curve.runs.values() for v in _known(run, by_log)]
        known = sorted(values) or [0.0, 1.0]
    first, end = (known[round(part * (len(known) - 1))] for part in (0.1, 0.9))
    room = end - first or 1.0
    low, high = max(known[0], first - room / 2), min(known[-1], end + room / 2)
    bands = [
        v for curve in curves for ends in (curve.low, curve.high) for v in _known(ends, by_log)
    ]
    near = [v for v in bands if low - room / 8 < v < high + room / 8]
    low, high = min([low, *near]), max([high, *near])
    if not by_log and known[0] >= 0:
        low = max(low, 0.0)
    if is_share(metric):
        low, high = (low, min(high, 0.0)) if by_log else (max(low, 0.0), min(high, 1.0))
    pad = 0.02 * (high - low) if high > low else 0.5
    low, high = low - pad, high + pad
    return (10**low, 10**high) if by_log else (low, high)


def n_of(curve: Curve) -> str:
    """`n = 3`, or `n = 2 to 3` where the number of runs changes over the steps."""
    known = [n for n in curve.n if n] or [0]
    return f"n = {min(known)}" + (f" to {max(known)}" if max(known) > min(known) else "")


def _curve_figure(report: StudyReport) -> Iterator[Figure]:
    if not report.curves:
        return
    metric = report.curves[0].metric
    found = curve_data(report, metric)
    last = max(one.curve.steps[-1] for one in found)
    panels = [curve_panel(one, curve_limits(one.both), last) for one in found[:MAX_PANELS]]
    said = f"{title(metric).capitalize()}: mean over seeds with its 95 % interval"
    if any(one.control for one in found):
        said += "; the control is dashed"
    yield Figure("curves", panels, 3, said, _first_of(len(panels), len(found)))


def _mean_columns(curve: Curve) -> Columns:
    return {
        "step": curve.steps,
        "mean": [short(v) for v in curve.mean],
        "low": [short(v) for v in curve.low],
        "high": [short(v) for v in curve.high],
        "n": curve.n,
    }


def _seed_columns(curve: Curve) -> Columns:
    """Every run by itself, those that diverged too."""
    runs = {run.name: run for run in curve.arm.runs}
    rows = [
        (step, short(number), runs[name].seed, runs[name].state)
        for name, values in curve.runs.items()
        for step, number in zip(curve.steps, values, strict=True)
        if number is not None and isfinite(number)
    ]
    names = ("step", "value", "seed", "state")
    return {key: [row[place] for row in rows] for place, key in enumerate(names)}


def _lone_points(curve: Curve, is_control: bool) -> list[tuple[int, float | None, bool]]:
    """Means without a neighbour: a line does not show them."""
    there = [False, *(mean is not None for mean in curve.mean), False]
    lone = [k for k in range(len(curve.mean)) if there[k : k + 3] == [False, True, False]]
    return [(curve.steps[k], short(curve.mean[k]), is_control) for k in lone]


def _known(values: Sequence[float | None], by_log: bool) -> list[float]:
    known = [v for v in values if v is not None and isfinite(v)]
    return [log10(v) for v in known if v > 0] if by_log else known


def _last(values: Sequence[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


@cache
def _curve_view(metric: str, share: bool, by_log: bool) -> Spec:
    def part(name: str, key: str = "mean") -> alt.Chart:
        chart = alt.Chart(alt.NamedData(name))
        return chart.transform_filter(f"datum.{key} > 0") if by_log else chart

    def band(name: str, color: str) -> alt.Chart:
        chart = alt.Chart(alt.NamedData(name))
        if by_log:
            chart = chart.transform_filter("datum.high > 0")
            chart = chart.transform_calculate(low="max(datum.low, 1e-30)")
        else:
            chart = chart.transform_filter("isValid(datum.low)")
        mark = chart.mark_area(color=color, opacity=0.17, clip=True)
        return mark.encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q")

    ends = [alt.ExprRef("low"), alt.ExprRef("high")]
    y = {
        "scale": alt.Scale(type="log" if by_log else "linear", domain=ends, nice=False, zero=False),
        "axis": alt.Axis(format=".2~%" if share else ".3~g", tickCount=4, labelOverlap=True),
        "title": metric,
    }
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[0, alt.ExprRef("last")], nice=False),
        axis=alt.Axis(format="~s", tickCount=4, grid=False),
        title="step",
    )
    number = ".4~%" if share else ".4~g"
    tips = ["step:Q", *(alt.Tooltip(f"{key}:Q", format=number) for key in ("mean", "low", "high"))]
    color = alt.condition("datum.control", alt.value(CONTROL), alt.value(TREATED))
    mean = alt.Y("mean:Q", **y)
    layers = alt.layer(
        band("control", CONTROL),
        band("mean", TREATED),
        part("seeds", "value")
        .mark_line(strokeWidth=1, clip=True)
        .encode(
            x=x,
            y=alt.Y("value:Q", **y),
            detail="seed:N",
            color=alt.condition("datum.state == 'diverged'", alt.value(BAD), alt.value(TREATED)),
            opacity=alt.condition("datum.state == 'diverged'", alt.value(0.8), alt.value(0.22)),
        ),
        part("control")
        .mark_line(color=CONTROL, strokeDash=[5, 3], strokeWidth=2, clip=True)
        .encode(x=x, y=mean),
        part("mean").mark_line(color=TREATED, strokeWidth=2, clip=True).encode(x=x, y=mean),
        part("points").mark_circle(size=45, opacity=1, clip=True).encode(x=x, y=mean, color=color),
        # invisible, to point at
        part("mean")
        .mark_rule(strokeWidth=7, opacity=0)
        .encode(x=x, tooltip=[*tips, alt.Tooltip("n:Q", title="runs")]),
    )
    return _spec(layers)


# Effects on gradients ------------------------------------------------------------------------


LABELS = {
    "cosine": "cosine of the gradient before and after",
    "ratio": "norm after over norm before",
    "changed": "fraction of entries changed",
    "flipped": "fraction of entries with the other sign",
    "zeroed": "fraction of entries made zero",
}


def effect_limits(maps: Sequence[EffectMap], measure: str) -> tuple[float, float]:
    """One colour scale for all arms and transforms; that of ratios is in powers of two."""
    shown = [one for one in maps if one.transform != "none"]
    known = [v for one in shown for row in one.means[measure] for v in row if v is not None]
    if measure == "ratio":
        sizes = [abs(log2(v)) for v in known if v > 0]
        reach = min(6.0, max(0.5, ceil(2 * max(sizes, default=0)) / 2))
        return -reach, reach
    if measure == "cosine":
        return floor(10 * min([0.9, *known])) / 10, 1.0
    return 0.0, max([0.01, *known])


def effect_panel(one: EffectMap, measure: str, limits: tuple[float, float]) -> Panel:
    """A measure of the effect at each site over the steps, as a map of colours."""
    rows = [
        (site, end, short(number, 3), _colour(number, measure))
        for site, numbers in zip(one.sites, one.means[measure], strict=True)
        for end, number in zip(one.ends, numbers, strict=True)
    ]
    names = ("site", "step", "value", "shade")
    cells = {key: [row[place] for row in rows] for place, key in enumerate(names)}
    overall = zip(one.sites[:12], one.overall[measure], strict=False)
    said = ", ".join(f"{site} {short(number, 3)}" for site, number in overall)
    return Panel(
        one.arm.name,
        f"{LABELS[measure]}, {len(one.sites)} sites over the steps; means of the training: {said}",
        _cells_view("site", measure),
        {"cells": cells},
        {"low": limits[0], "high": limits[1]},
        height=(13 if len(one.sites) > 40 else 22) * len(one.sites),
    )


def site_panels(maps: Sequence[EffectMap]) -> list[Panel]:
    """Cosine, norm ratio and fraction changed of each site and arm, over the whole training."""
    panels = []
    for measure in MEASURES[:3]:
        rows = [
            (site, map_name(one), short(number, 3), _colour(number, measure))
            for one in maps
            for site, number in zip(one.sites, one.overall[measure], strict=True)
        ]
        known = [row[2] for row in rows if row[2] is not None]
        limits = (-3.0, 3.0) if measure == "ratio" else (min([0.0, *known]), 1.0)
        names = ("site", "arm", "value", "shade")
        cells = {key: [row[place] for row in rows] for place, key in enumerate(names)}
        sites = len(dict.fromkeys(cells["site"]))
        panel = Panel(
            measure.replace("ratio", "norm ratio").replace("changed", "fraction changed"),
            f"{LABELS[measure]}, {sites} sites of {count(len(maps), 'arm')}",
            _sites_view(measure, first=not panels),
            {"cells": cells},
            {"low": limits[0], "high": limits[1]},
            width=max(90, min(28 * len(maps), 420)),
            height=(14 if sites > 30 else 22) * sites,
        )
        panels.append(panel)
    return panels


def map_name(one: EffectMap) -> str:
    """The arm, and the transform where the arm does not name it."""
    name = one.arm.name
    if one.transform == "none":
        return f"{name} (nothing was changed)"
    return name if one.transform == name.split(" · ")[0] else f"{name}: {one.transform}"


def norm_panel(norms: Norms) -> Panel:
    """Gradient norms before and after a transform."""
    width = (norms.high - norms.low) / len(norms.before)
    edges = [float(f"{10 ** (norms.low + width * k):.4g}") for k in range(len(norms.before) + 1)]
    bins = {
        "from": edges[:-1],
        "to": edges[1:],
        "before": [short(v, 3) for v in norms.before],
        "after": [short(v, 3) for v in norms.after or []] or [None] * len(norms.before),
    }
    outline = {"norm": edges, "share": [*bins["before"], bins["before"][-1]]}
    zeros = [
        f"{share:.0%} are zero {when}"
        for share, when in ((norms.zero_before, "before"), (norms.zero_after, "after"))
        if share
    ]
    of = f"{cut(norms.arm.name)}, n = {norms.n}"
    return Panel(
        ", ".join([of, *zeros]),
        f"Gradient norms of {norms.arm.name}, {norms.transform}, from {edges[0]:g} to "
        f"{edges[-1]:g}{', before and after' if norms.after else ''}. {'; '.join(zeros)}",
        _norm_view(),
        {"bins": bins, "outline": outline},
        height=150,
    )


def _colour(number: float | None, measure: str) -> float | None:
    """The value on the colour scale: that of a ratio is its logarithm."""
    if number is None or measure != "ratio":
        return short(number, 3)
    return short(log2(number), 3) if number > 0 else -30


def _shade(measure: str, legend: alt.Legend | None) -> alt.Color:
    ends = [alt.ExprRef("low"), alt.ExprRef("high")]
    scheme = "purpleorange" if measure in ("ratio", "conflict") else "cividis"
    reverse = measure in ("ratio", "conflict")
    scale = alt.Scale(scheme=scheme, domain=ends, clamp=True, reverse=reverse)
    return alt.Color("shade:Q", scale=scale, legend=legend)


def _shade_legend(measure: str, name: str, orient: str = "bottom") -> alt.Legend:
    powers = "format(pow(2, datum.value), '.3~g')"
    share = measure in ("changed", "flipped", "zeroed")
    more = {"labelExpr": powers} if measure == "ratio" else {}
    return alt.Legend(
        title=name,
        orient=orient,
        gradientLength=180 if orient == "bottom" else 100,
        gradientThickness=10,
        tickCount=4,
        format=".2~%" if share else ".2~g",
        **more,
    )


@cache
def _cells_view(row: str, measure: str) -> Spec:
    name = LABELS.get(measure, "cosine of the gradients of two tasks")
    share = measure in ("changed", "flipped", "zeroed")
    tips = [
        f"{row}:N",
        alt.Tooltip("step:O", title="up to step"),
        alt.Tooltip("value:Q", title=measure, format=".3~%" if share else ".3~g"),
    ]
    chart = alt.Chart(alt.NamedData("cells")).transform_filter("isValid(datum.value)")
    chart = chart.mark_rect(stroke=None).encode(
        x=alt.X(
            "step:O",
            sort=None,
            scale=alt.Scale(padding=0),
            axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, labelFlush=True),
            title="up to step",
        ),
        y=alt.Y(
            f"{row}:N",
            sort=None,
            title=None,
            scale=alt.Scale(paddingInner=0.05),
            axis=alt.Axis(domain=False, ticks=False),
        ),
        color=_shade(measure, _shade_legend(measure, name)),
        tooltip=tips,
    )
    return _spec(chart)


@cache
def _sites_view(measure: str, first: bool) -> Spec:
    axis = alt.Axis(domain=False, ticks=False, labels=first)
    chart = alt.Chart(alt.NamedData("cells")).transform_filter("isValid(datum.value)")
    chart = chart.mark_rect(stroke=None).encode(
        x=alt.X("arm:N", sort=None, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=150)),
        y=alt.Y("site:N", sort=None, title=None, axis=axis),
        color=_shade(measure, _shade_legend(measure, "", "right")),
        tooltip=["site:N", "arm:N", alt.Tooltip("value:Q", format=".3~g")],
    )
    return _spec(chart)


@cache
def _norm_view() -> Spec:
    bins, outline = alt.Chart(alt.NamedData("bins")), alt.Chart(alt.NamedData("outline"))
    scale = alt.Scale(type="log", nice=False)
    axis = alt.Axis(format="~g", tickCount=4, grid=False, labelOverlap=True)
    x = {"scale": scale, "axis": axis, "title": "gradient norm (log scale)"}
    y = {"axis": alt.Axis(format=".2~%", tickCount=4), "title": "share of gradients"}
    tips = [
        alt.Tooltip("from:Q", format=".3~g"),
        alt.Tooltip("to:Q", format=".3~g"),
        alt.Tooltip("before:Q", format=".2~%"),
        alt.Tooltip("after:Q", format=".2~%"),
    ]
    names = alt.Scale(domain=["after", "before"], range=[TREATED, CONTROL])
    key = alt.Color("series:N", scale=names, legend=alt.Legend(title=None, orient="top"))
    layers = alt.layer(
        bins.transform_calculate(series="'after'")
        .mark_rect(opacity=0.55)
        .encode(
            x=alt.X("from:Q", **x), x2="to:Q", y=alt.Y("after:Q", **y), y2=alt.datum(0), color=key
        ),
        outline.transform_calculate(series="'before'")
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(x=alt.X("norm:Q", **x), y=alt.Y("share:Q", **y), color=key),
        bins.transform_calculate(top="max(datum.before, datum.after)")
        .mark_rect(opacity=0)
        .encode(
            x=alt.X("from:Q", **x), x2="to:Q", y=alt.Y("top:Q", **y), y2=alt.datum(0), tooltip=tips
        ),
    )
    return _spec(layers)


# Conflicts between tasks ---------------------------------------------------------------------


def conflict_reach(series: Sequence[ConflictSeries]) -> float:
    """The greatest cosine of a conflict map, in size: one colour scale for all arms."""
    known = [abs(v) for one in series for row in one.cosines.tolist() for v in row if v == v]
    return min(1.0, max(0.2, ceil(10 * max(known, default=0.0)) / 10))


def conflict_panel(one: ConflictSeries, reach: float) -> Panel:
    """The cosine of each two tasks over the steps, as a map of colours."""
    names = [cut(pair_name(one.means.tasks, pair)) for pair in one.pairs]
    rows = [
        (name, end, short(float(number), 3), short(float(number), 3))
        for name, numbers in zip(names, one.cosines, strict=True)
        for end, number in zip(one.ends, numbers, strict=True)
    ]
    keys = ("pair", "step", "value", "shade")
    means = [short(float(one.means.cosines[b, a]), 3) for a, b in one.pairs]
    said = ", ".join(f"{name} {mean}" for name, mean in zip(names[:12], means, strict=False))
    return Panel(
        conflict_title(one),
        f"Cosine of the gradients of two tasks, {len(names)} pairs over the steps; means of the "
        f"training: {said}",
        _cells_view("pair", "conflict"),
        {"cells": {key: [row[place] for row in rows] for place, key in enumerate(keys)}},
        {"low": -reach, "high": reach},
        height=(15 if len(names) > 15 else 24) * len(names),
    )


def task_panel(one: ConflictSeries, lines: Lines, measure: str) -> Panel:
    """A line with its interval for each task: its weight, or by how much its loss decreases."""
    tasks = [one.means.tasks[task] for task in one.shown]
    parts = (lines.mean.tolist(), lines.low.tolist(), lines.high.tolist())
    rows = [
        (task, one.ends[k], *(short(part[place][k], 3) for part in parts))
        for place, task in enumerate(tasks)
        for k in range(len(one.ends))
    ]
    keys = ("task", "step", "mean", "low", "high")
    means = [short(v) for row in parts[0] for v in row]
    known = [v for v in means if v is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    room = (high - low or 1) / 4
    ends = [short(v) for part in parts[1:] for row in part for v in row]
    near = [v for v in ends if v is not None and low - room < v < high + room]
    low, high = min([low, *near]), max([high, *near])
    pad = 0.04 * (high - low) or 0.5
    low, high = low - pad * (low < 0), high + pad
    last = [f"{task} {short(row[-1], 3)}" for task, row in zip(tasks, parts[0], strict=True)]
    return Panel(
        conflict_title(one),
        f"{measure.capitalize()} of {one.name} over steps, at the end: {', '.join(last)}",
        _task_view(measure),
        {"tasks": {key: [row[place] for row in rows] for place, key in enumerate(keys)}},
        {
            "low": low,
            "high": high,
            "tasks": tasks,
            "first": min(one.ends[0], one.ends[-1] - 1),
            "last": one.ends[-1],
        },
    )


def conflict_title(one: ConflictSeries) -> str:
    return f"{cut(one.name)}, n = {one.means.runs}"


def _conflict_figures(series: Sequence[ConflictSeries]) -> Iterator[Figure]:
    every = [one for one in sharpest(series) if one.pairs]
    if every:
        shown = every[:MAX_PANELS]
        reach = conflict_reach(shown)
        panels = [conflict_panel(one, reach) for one in shown]
        said = "Cosine of the gradients of two tasks"
        yield Figure("conflicts", panels, 3, said, _first_of(len(shown), len(every)))
    for name, measure in (("conflict-weights", "weight"), ("conflict-decrease", "decrease")):
        known = [
            (one, lines)
            for one in sharpest(series)
            if (lines := one.weights if measure == "weight" else one.decrease) is not None
        ]
        panels = [task_panel(one, lines, measure) for one, lines in known[:MAX_PANELS]]
        if panels:
            said = f"{measure.capitalize()} of each task, with its 95 % interval over seeds"
            yield Figure(name, panels, 3, said, _first_of(len(panels), len(known)))


@cache
def _task_view(measure: str) -> Spec:
    tasks = alt.Chart(alt.NamedData("tasks"))
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[alt.ExprRef("first"), alt.ExprRef("last")], nice=False),
        axis=alt.Axis(format="~s", tickCount=4, grid=False),
        title="step",
    )
    scale = alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=True)
    y = {"scale": scale, "axis": alt.Axis(format=".3~g", tickCount=4), "title": measure}
    names = alt.ExprRef("tasks")
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=4,
        symbolType="stroke",
        symbolOpacity=1,
        symbolStrokeWidth=2,
    )
    dashes = [DASHES[place % len(DASHES)] for place in range(len(TASKS))]
    color = alt.Color(
        "task:N", scale=alt.Scale(domain=names, range=list(TASKS)), sort=None, legend=legend
    )
    dash = alt.StrokeDash(
        "task:N", scale=alt.Scale(domain=names, range=dashes), sort=None, legend=legend
    )
    tips = ["task:N", alt.Tooltip("step:Q", title="up to step"), "mean:Q", "low:Q", "high:Q"]
    layers = alt.layer(
        tasks.transform_filter("isValid(datum.low)")
        .mark_area(opacity=0.1, clip=True)
        .encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=color),
        _zero("y"),
        tasks.mark_line(strokeWidth=2, clip=True).encode(
            x=x, y=alt.Y("mean:Q", **y), color=color, strokeDash=dash
        ),
        tasks.mark_circle(size=24, opacity=1, clip=True).encode(
            x=x, y=alt.Y("mean:Q", **y), color=color, tooltip=tips
        ),
    )
    return _spec(layers)


# Trade-off between tasks ---------------------------------------------------------------------


def front_panel(front: Front, first: int, second: int) -> Panel:
    """Two tasks of several: each run, and each arm's mean with its intervals."""
    (x_low, x_high, x_log), (y_low, y_high, y_log) = (ends_of(front, k) for k in (first, second))

    def inside(number: float | None, low: float, high: float) -> float | None:
        return None if number is None else short(min(max(number, low), high), 6)

    runs = [
        (short(x), short(y), mark.arm.is_control)
        for mark in front.marks
        for x, y in zip(mark.values[first], mark.values[second], strict=True)
    ]
    arms = [
        (
            *(number, mark.arm.name, mark.arm.is_control, not mark.beaten_by, len(mark.seeds)),
            *(short(mark.means[first].mean), short(mark.means[second].mean)),
            *(
                inside(end, x_low, x_high)
                for end in (mark.means[first].low, mark.means[first].high)
            ),
            *(
                inside(end, y_low, y_high)
                for end in (mark.means[second].low, mark.means[second].high)
            ),
        )
        for number, mark in enumerate(front.marks, 1)
    ]
    texts = [(x, y, text) for (x, y), text in clusters(front, first, second)]
    keys = {
        "runs": ("x", "y", "control"),
        "arms": (
            *("number", "arm", "control", "best", "runs", "x", "y"),
            *("x_low", "x_high", "y_low", "y_high"),
        ),
        "texts": ("x", "y", "text"),
    }
    tables = {"runs": runs, "arms": arms, "texts": texts}
    data = {
        name: {key: [row[place] for row in tables[name]] for place, key in enumerate(names)}
        for name, names in keys.items()
    }
    labels = [f"{front.metric} {front.names[task]}" for task in (first, second)]
    said = "; ".join(f"{row[0]} {row[1]}: {row[5]} and {row[6]}" for row in arms)
    better = "lower left" if front.lower_is_better else "upper right"
    return Panel(
        f"{front.names[first]} and {front.names[second]}, {better} is better",
        f"{labels[1]} over {labels[0]}. {said}",
        _front_view(labels[0], labels[1], is_share(front.metric), x_log, y_log),
        data,
        {"x_low": x_low, "x_high": x_high, "y_low": y_low, "y_high": y_high},
        height=220,
    )


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
        f"{front.task}, test {front.metric} of each task{of}",
        "\n".join([note, *lines]),
    )


@cache
def _front_view(x_title: str, y_title: str, share: bool, x_log: bool, y_log: bool) -> Spec:
    def axis(name: str, by_log: bool) -> dict[str, Any]:  # Any: keywords of a channel
        ends = [alt.ExprRef(f"{name}_low"), alt.ExprRef(f"{name}_high")]
        kind = "log" if by_log else "linear"
        label = (x_title if name == "x" else y_title) + (" (log scale)" if by_log else "")
        return {
            "scale": alt.Scale(type=kind, domain=ends, nice=False, zero=False),
            "axis": alt.Axis(format=".2~%" if share else ".3~g", tickCount=5, labelOverlap=True),
            "title": label,
        }

    runs, arms, texts = (alt.Chart(alt.NamedData(name)) for name in ("runs", "arms", "texts"))
    x, y = axis("x", x_log), axis("y", y_log)
    color = alt.condition("datum.control", alt.value(CONTROL), alt.value(TREATED))
    number = ".4~%" if share else ".4~g"
    rule = {"strokeWidth": 1.4, "opacity": 0.8}
    layers = alt.layer(
        runs.mark_circle(size=16, opacity=0.4).encode(
            x=alt.X("x:Q", **x), y=alt.Y("y:Q", **y), color=color
        ),
        arms.mark_rule(**rule).encode(
            x=alt.X("x_low:Q", **x), x2="x_high:Q", y=alt.Y("y:Q", **y), color=color
        ),
        arms.mark_rule(**rule).encode(
            x=alt.X("x:Q", **x), y=alt.Y("y_low:Q", **y), y2="y_high:Q", color=color
        ),
        arms.mark_point(size=70, opacity=1, strokeWidth=2, fill=PAPER).encode(
            x=alt.X("x:Q", **x),
            y=alt.Y("y:Q", **y),
            stroke=color,
            tooltip=[
                alt.Tooltip("arm:N"),
                alt.Tooltip("x:Q", title=x_title, format=number),
                alt.Tooltip("y:Q", title=y_title, format=number),
                alt.Tooltip("runs:Q"),
            ],
        ),
        arms.transform_filter("datum.best")
        .mark_circle(size=70, opacity=1)
        .encode(x=alt.X("x:Q", **x), y=alt.Y("y:Q", **y), color=color, tooltip=["arm:N"]),
        texts.mark_text(align="left", dx=7, dy=-7, color=INK, fontSize=12).encode(
            x=alt.X("x:Q", **x), y=alt.Y("y:Q", **y), text="text:N"
        ),
    )
    return _spec(layers)


# Parts of all charts -------------------------------------------------------------------------


def cut(name: str) -> str:
    """A name of at most `MAX_NAME` characters."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _first_of(shown: int, there: int) -> str:
    return "" if shown == there else f"the first {shown} of {there} arms; the page has them all"


def _arm_with_n(outcome: Outcome) -> str:
    number = outcome.difference.n if outcome.difference else 0
    of = "" if number == outcome.planned else f" of {outcome.planned}"
    return f"{cut(outcome.arm.name)} (n = {number}{of})"


def _zero(channel: str, at: float = 0) -> alt.Chart:
    """A dashed line at 0, or where nothing would have changed."""
    rule = alt.Chart(alt.sequence(1)).mark_rule(color=SOFT, strokeDash=[2, 2])
    return rule.encode(**{channel: alt.datum(at)})


def _spec(chart: alt.Chart | alt.LayerChart) -> Spec:
    spec = chart.to_dict(validate=False)
    return {key: item for key, item in spec.items() if key not in ("$schema", "config")}


def _bound(node: Any, limits: Mapping[str, object], number: str) -> Any:  # Any: JSON
    """A view with its open numbers filled in and its datasets renamed to `name-number`."""
    if isinstance(node, list):
        return [_bound(item, limits, number) for item in node]
    if not isinstance(node, dict):
        return node
    if node.keys() == {"expr"} and node["expr"] in limits:
        return limits[node["expr"]]
    if node.keys() == {"name"}:
        return {"name": f"{node['name']}-{number}"}
    return {key: _bound(item, limits, number) for key, item in node.items()}
