"""Charts of training: learning curves, effects on gradients, conflicts between tasks."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, floor, isfinite, log2, log10
from typing import Any, Literal

import altair as alt

from gradsurg.report.charts import (
    BAD,
    CONTROL,
    DASHES,
    TASKS,
    TREATED,
    Columns,
    Grid,
    Panel,
    Spec,
    Table,
    columns_of,
    cut,
    rounded,
    scale_of,
    short,
    spec_of,
    zero_line,
)
from gradsurg.report.conflicts import ConflictSeries, Lines, pair_name
from gradsurg.report.series import MEASURES, Curve, EffectMap, Norms
from gradsurg.report.study import StudyReport
from gradsurg.report.wording import count, is_share, title, value


@dataclass(frozen=True)
class CurveData:
    """A learning curve with that of its control, if there is one."""

    curve: Curve
    control: Curve | None
    data: Mapping[str, Table]

    @property
    def both(self) -> list[Curve]:
        return [self.curve, *([self.control] if self.control else [])]


def curve_data(report: StudyReport, metric: str) -> list[CurveData]:
    """The curves of a metric: the treated arms with their controls, or all if none is treated."""
    by_arm = {curve.arm.name: curve for curve in report.curves if curve.metric == metric}
    treated = [curve for curve in by_arm.values() if not curve.arm.is_control]
    homes = {run.name: arm.name for arm in report.arms for run in arm.runs}
    means = {name: _mean_columns(curve) for name, curve in by_arm.items()}
    empty: Columns = {key: [] for key in ("step", "mean", "low", "high", "n")}
    shown_curves = []
    for curve in treated or by_arm.values():
        behind = next((homes[run.control] for run in curve.arm.runs if run.control in homes), "")
        control = by_arm.get(behind)
        lone = _lone_points(curve, False), _lone_points(control, True) if control else []
        points = [point for part in lone for point in part]
        data = {
            "mean": means[curve.arm.name],
            "control": means[behind] if control else empty,
            "seeds": _seed_grid(curve),
            "points": columns_of(("step", "mean", "control"), points),
        }
        shown_curves.append(CurveData(curve, control, data))
    return shown_curves


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


def last_step(curves: Sequence[CurveData]) -> int:
    """The last step of some curves and their controls: where the axis of all their panels ends."""
    return max(curve.steps[-1] for one in curves for curve in one.both)


def n_of(curve: Curve) -> str:
    """`n = 3`, or `n = 2 to 3` where the number of runs changes over the steps."""
    known = [n for n in curve.n if n] or [0]
    return f"n = {min(known)}" + (f" to {max(known)}" if max(known) > min(known) else "")


def _mean_columns(curve: Curve) -> Columns:
    parts = {"mean": curve.mean, "low": curve.low, "high": curve.high}
    return {
        "step": curve.steps,
        **{key: rounded(part) for key, part in parts.items()},
        "n": curve.n,
    }


def _seed_grid(curve: Curve) -> Grid:
    """One panel per run, also for diverged runs."""
    runs = {run.name: run for run in curve.arm.runs}
    shown = [runs[name] for name in curve.runs]
    labels: Columns = {"seed": [run.seed for run in shown], "state": [run.state for run in shown]}
    return Grid(labels, curve.steps, {"value": [rounded(row) for row in curve.runs.values()]})


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
        mark = chart.mark_area(color=color, fillOpacity=0.17, clip=True)
        return mark.encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q")

    ends = [alt.ExprRef("low"), alt.ExprRef("high")]
    y = {
        "scale": scale_of(by_log, domain=ends),
        "axis": alt.Axis(format=".2~%" if share else ".3~g", tickCount=4, labelOverlap=True),
        "title": metric,
    }
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[0, alt.ExprRef("last")], nice=False),
        axis=alt.Axis(format="~s", tickCount=4, grid=False),
        title="optimizer step",
    )
    number = ".4~%" if share else ".4~g"
    tips = ["step:Q", *(alt.Tooltip(f"{key}:Q", format=number) for key in ("mean", "low", "high"))]
    color = alt.condition("datum.control", alt.value(CONTROL), alt.value(TREATED))
    mean = alt.Y("mean:Q", **y)
    seeds = part("seeds", "value")
    state = alt.condition("datum.state == 'diverged'", alt.value(BAD), alt.value(TREATED))
    layers = alt.layer(
        band("control", CONTROL),
        band("mean", TREATED),
        seeds.mark_line(strokeWidth=1, clip=True).encode(
            x=x,
            y=alt.Y("value:Q", **y),
            detail="seed:N",
            color=state,
            strokeOpacity=alt.condition(
                "datum.state == 'diverged'", alt.value(0.8), alt.value(0.22)
            ),
        ),
        part("control")
        .mark_line(color=CONTROL, strokeDash=[5, 3], strokeWidth=2, clip=True)
        .encode(x=x, y=mean),
        part("mean").mark_line(color=TREATED, strokeWidth=2, clip=True).encode(x=x, y=mean),
        *_arrows(seeds.transform_calculate(mean="datum.value"), x, ["seed"], 12, color=state),
        *_arrows(part("control"), x, color=alt.value(CONTROL)),
        *_arrows(part("mean"), x, color=alt.value(TREATED)),
        part("points").mark_circle(size=45, opacity=1, clip=True).encode(x=x, y=mean, color=color),
        # invisible, to point at
        part("mean")
        .mark_rule(strokeWidth=7, strokeOpacity=0)
        .encode(x=x, tooltip=[*tips, alt.Tooltip("n:Q", title="runs")]),
    )
    return spec_of(layers)


def _arrows(
    means: alt.Chart, x: alt.X, group: Sequence[str] = (), size: int = 40, **channels: Any
) -> list[alt.Chart]:
    """An arrow at each step from which a mean is above or below the axis; `group` names its curve.

    Any: channels of Altair.
    """
    low, high = alt.ExprRef("low"), alt.ExprRef("high")
    window: dict[str, Any] = {"before": "lag(mean)", "sort": [alt.SortField("step")]}
    after = means.transform_window(**window, groupby=list(group))

    def leaves(beyond: dict[str, Any], inside: dict[str, Any]) -> alt.Chart:
        first = {"or": [{"field": "before", **inside}, "datum.before === null"]}
        where: Any = {"and": [{"field": "mean", **beyond}, first]}  # Any: Vega-Lite as JSON
        return after.transform_filter(where)

    ends = (
        (leaves({"gt": high}, {"lte": high}), "triangle-up", alt.value(3)),
        (leaves({"lt": low}, {"gte": low}), "triangle-down", alt.value("height")),
    )
    return [
        chart.mark_point(size=size, shape=shape, filled=True, opacity=1).encode(
            x=x, y=y, **channels
        )
        for chart, shape, y in ends
    ]


def overlay_panel(report: StudyReport, metric: str, by_log: bool = False) -> Panel:
    """The learning curves of all arms in one panel, each control once."""
    shown = [curve for curve in report.curves if curve.metric == metric]
    rows = [
        (curve.arm.name, step, *map(short, ends))
        for curve in shown
        for step, *ends in zip(curve.steps, curve.mean, curve.low, curve.high, strict=True)
    ]
    names = [curve.arm.name for curve in shown]
    treated = [curve.arm.name for curve in shown if not curve.arm.is_control]
    texts = [f"{curve.arm.name} {value(metric, _last(curve.mean))}" for curve in shown]
    low, high = curve_limits(shown, by_log)
    controls = [[5, 3], [2, 2], [8, 3, 2, 3], [12, 4]]
    palette = [colour for colour in TASKS if colour != CONTROL]
    dashes = [
        DASHES[treated.index(name) // len(palette) % len(DASHES)]
        if name in treated
        else controls[(names.index(name) - len(treated)) % len(controls)]
        for name in names
    ]
    colours = [
        palette[treated.index(name) % len(palette)] if name in treated else CONTROL
        for name in names
    ]
    sizes = {n_of(curve) for curve in shown}
    return Panel(
        f"All arms{f', {sizes.pop()}' if len(sizes) == 1 else ''}",
        f"{title(metric)} of all arms over the steps, last means: {'; '.join(texts)}",
        _overlay_view(title(metric), is_share(metric), by_log, len(names) > 4),
        {"curves": columns_of(("arm", "step", "mean", "low", "high"), rows)},
        {
            "low": low,
            "high": high,
            "last": max(curve.steps[-1] for curve in shown),
            "arms": names,
            "colours": colours,
            "dashes": dashes,
        },
        width=420,
        height=260,
    )


@cache
def _overlay_view(metric: str, share: bool, by_log: bool, many: bool) -> Spec:
    curves = alt.Chart(alt.NamedData("curves"))
    if by_log:
        curves = curves.transform_filter("datum.mean > 0")
        curves = curves.transform_calculate(low="max(datum.low, 1e-30)")
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[0, alt.ExprRef("last")], nice=False),
        axis=alt.Axis(format="~s", tickCount=5, grid=False),
        title="optimizer step",
    )
    y = {
        "scale": scale_of(by_log, domain=[alt.ExprRef("low"), alt.ExprRef("high")]),
        "axis": alt.Axis(format=".2~%" if share else ".3~g", tickCount=5, labelOverlap=True),
        "title": metric + (" (log scale)" if by_log else ""),
    }
    names = alt.ExprRef("arms")
    look: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 2, "symbolSize": 200}
    legend = alt.Legend(title=None, orient="bottom", columns=2, **look)
    colours, dashes = (alt.Scale(domain=names, range=[key]) for key in ("colours", "dashes"))
    color = alt.Color("arm:N", sort=None, scale=colours, legend=legend)
    dash = alt.StrokeDash("arm:N", sort=None, scale=dashes, legend=legend)
    tips = ["arm:N", "step:Q", *(alt.Tooltip(f"{key}:Q") for key in ("mean", "low", "high"))]
    opacity = 0.06 if many else 0.14
    bands = curves.transform_filter("isValid(datum.low)").mark_area(fillOpacity=opacity, clip=True)
    layers = alt.layer(
        bands.encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=color),
        curves.mark_line(strokeWidth=2, clip=True).encode(
            x=x, y=alt.Y("mean:Q", **y), color=color, strokeDash=dash
        ),
        # a line does not show a curve of one point
        curves.transform_joinaggregate(points="count()", groupby=["arm"])
        .transform_filter("datum.points == 1")
        .mark_circle(size=45, opacity=1, clip=True)
        .encode(x=x, y=alt.Y("mean:Q", **y), color=color),
        *_arrows(curves, x, ["arm"], color=color),
        # invisible, to point at
        curves.mark_point(size=60, opacity=0, fillOpacity=0, clip=True).encode(
            x=x, y=alt.Y("mean:Q", **y), tooltip=tips
        ),
    )
    # Altair refuses an expression as a range, Vega-Lite takes it
    text = re.sub(r'\["(colours|dashes)"\]', r'{"expr": "\1"}', json.dumps(spec_of(layers)))
    spec: Spec = json.loads(text)
    return spec


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
    means = [rounded(row, 3) for row in one.means[measure]]
    overall = zip(one.sites[:12], one.overall[measure], strict=False)
    text = ", ".join(f"{site} {short(number, 3)}" for site, number in overall)
    return Panel(
        one.arm.name,
        f"{LABELS[measure]}, {len(one.sites)} sites over the steps; means of the training: {text}",
        _cells_view("site", measure),
        {"cells": Grid({"site": one.sites}, one.ends, {"value": means})},
        {"low": limits[0], "high": limits[1]},
        height=(13 if len(one.sites) > 40 else 22) * len(one.sites),
    )


def site_panels(maps: Sequence[EffectMap]) -> list[Panel]:
    """Cosine, norm ratio and fraction changed of each site and arm, over the whole training."""
    panels = []
    for measure in MEASURES[:3]:
        rows = [
            (site, map_name(one), short(number, 3))
            for one in maps
            for site, number in zip(one.sites, one.overall[measure], strict=True)
        ]
        known = [row[2] for row in rows if row[2] is not None]
        limits = (-3.0, 3.0) if measure == "ratio" else (min([0.0, *known]), 1.0)
        cells = columns_of(("site", "arm", "value"), rows)
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
    return name if one.transform == one.arm.runs[0].label else f"{name}: {one.transform}"


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


def _cells(measure: str) -> alt.Chart:
    """Cells that have a value; that of a ratio has its logarithm as its place on the scale."""
    shade = "max(-30, log(datum.value) / LN2)" if measure == "ratio" else "datum.value"
    chart = alt.Chart(alt.NamedData("cells")).transform_filter("isValid(datum.value)")
    return chart.transform_calculate(shade=shade)


def _shade(measure: str, legend: alt.Legend) -> alt.Color:
    diverging = measure in ("ratio", "conflict")
    scale = alt.Scale(
        scheme="purpleorange" if diverging else "cividis",
        reverse=diverging,
        domain=[alt.ExprRef("low"), alt.ExprRef("high")],
        clamp=True,
    )
    return alt.Color("shade:Q", scale=scale, legend=legend)


def _shade_legend(
    measure: str, name: str, orient: Literal["bottom", "right"] = "bottom"
) -> alt.Legend:
    powers = "format(pow(2, datum.value), '.3~g')"
    share = measure in ("changed", "flipped", "zeroed")
    # Any: keywords of alt.Legend
    more: dict[str, Any] = {"labelExpr": powers} if measure == "ratio" else {}
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
    chart = _cells(measure)
    chart = chart.mark_rect(stroke=None).encode(
        x=alt.X(
            "step:O",
            sort=None,
            scale=alt.Scale(padding=0),
            axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, labelFlush=True),
            title="up to optimizer step",
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
    return spec_of(chart)


@cache
def _sites_view(measure: str, first: bool) -> Spec:
    axis = alt.Axis(domain=False, ticks=False, labels=first)
    chart = _cells(measure)
    chart = chart.mark_rect(stroke=None).encode(
        x=alt.X("arm:N", sort=None, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=150)),
        y=alt.Y("site:N", sort=None, title=None, axis=axis),
        color=_shade(measure, _shade_legend(measure, "", "right")),
        tooltip=["site:N", "arm:N", alt.Tooltip("value:Q", format=".3~g")],
    )
    return spec_of(chart)


@cache
def _norm_view() -> Spec:
    bins, outline = alt.Chart(alt.NamedData("bins")), alt.Chart(alt.NamedData("outline"))
    scale = alt.Scale(type="log", nice=False)
    axis = alt.Axis(format="~g", tickCount=6, grid=False, labelOverlap=True)
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
        .mark_rect(fillOpacity=0.55)
        .encode(
            x=alt.X("from:Q", **x), x2="to:Q", y=alt.Y("after:Q", **y), y2=alt.datum(0), color=key
        ),
        outline.transform_calculate(series="'before'")
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(x=alt.X("norm:Q", **x), y=alt.Y("share:Q", **y), color=key),
        bins.transform_calculate(top="max(datum.before, datum.after)")
        .mark_rect(fillOpacity=0)
        .encode(
            x=alt.X("from:Q", **x), x2="to:Q", y=alt.Y("top:Q", **y), y2=alt.datum(0), tooltip=tips
        ),
    )
    return spec_of(layers)


def conflict_reach(series: Sequence[ConflictSeries]) -> float:
    """The greatest cosine of a conflict map, in size: one colour scale for all arms."""
    known = [abs(v) for one in series for row in one.cosines.tolist() for v in row if v == v]
    return min(1.0, max(0.2, ceil(10 * max(known, default=0.0)) / 10))


def conflict_panel(one: ConflictSeries, reach: float) -> Panel:
    """The cosine of each two tasks over the steps, as a map of colours."""
    names = [cut(pair_name(one.means.tasks, pair)) for pair in one.pairs]
    cells = Grid(
        {"pair": names}, one.ends, {"value": [rounded(row, 3) for row in one.cosines.tolist()]}
    )
    means = [short(float(one.means.cosines[b, a]), 3) for a, b in one.pairs]
    text = ", ".join(f"{name} {mean}" for name, mean in zip(names[:12], means, strict=False))
    return Panel(
        conflict_title(one),
        f"Cosine of the gradients of two tasks, {len(names)} pairs over the steps; means of the "
        f"training: {text}",
        _cells_view("pair", "conflict"),
        {"cells": cells},
        {"low": -reach, "high": reach},
        height=(15 if len(names) > 15 else 24) * len(names),
    )


def task_panel(one: ConflictSeries, lines: Lines, measure: str) -> Panel:
    """A line with its interval for each task: its weight, or by how much its loss decreases."""
    tasks = [one.means.tasks[task] for task in one.shown]
    parts = (lines.mean.tolist(), lines.low.tolist(), lines.high.tolist())
    keys = ("mean", "low", "high")
    grid = Grid(
        {"task": tasks},
        one.ends,
        {key: [rounded(row, 3) for row in part] for key, part in zip(keys, parts, strict=True)},
    )
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
        {"tasks": grid},
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


@cache
def _task_view(measure: str) -> Spec:
    tasks = alt.Chart(alt.NamedData("tasks"))
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[alt.ExprRef("first"), alt.ExprRef("last")], nice=False),
        axis=alt.Axis(format="~s", tickCount=4, grid=False),
        title="optimizer step",
    )
    scale = alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=True, clamp=True)
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
        .mark_area(fillOpacity=0.1)
        .encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=color),
        zero_line("y"),
        tasks.mark_line(strokeWidth=2).encode(
            x=x, y=alt.Y("mean:Q", **y), color=color, strokeDash=dash
        ),
        tasks.mark_circle(size=24, opacity=1).encode(
            x=x, y=alt.Y("mean:Q", **y), color=color, tooltip=tips
        ),
    )
    return spec_of(layers)
