"""Charts of a study: functions from data frames to Altair charts, for the page and for files.

Choices, such as the metric, are parameters of the chart. Data is aggregated and thinned before.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from math import isfinite, sqrt
from typing import Any

import altair as alt
import polars as pl

from gradsurg.effects.numbers import EFFECT_NUMBERS
from gradsurg.report.wording import HEADLINE, is_share, title
from gradsurg.stats import t_critical

Chart = alt.Chart | alt.LayerChart | alt.FacetChart
Json = Any  # Any: what JSON can hold; Altair's own types are wider
# Okabe and Ito: distinct for all kinds of colour vision, and in grey.
TREATED, CONTROL, UNCLEAR, BAD = "#0072b2", "#d55e00", "#767676", "#a3261d"
INK, SOFT, LINE, GRID, PAPER = "#1b1d22", "#565b66", "#b9b6af", "#eceae6", "#ffffff"
MORE = ("#009e73", "#cc79a7", "#8c6d00", "#3d3db8", "#222222")
TASKS = (TREATED, CONTROL, *MORE, UNCLEAR)
DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3])
CONTROL_DASHES = ([5, 3], [2, 2], [8, 3, 2, 3], [12, 4])
LIGHT = (TREATED, CONTROL, UNCLEAR, BAD, INK, SOFT, LINE, GRID, PAPER, *MORE)
DARK = (
    *("#74b9f5", "#f0a860", "#a4a9b4", "#ff9d92", "#e9e8e4", "#a9aeb9", "#4a505c", "#282c34"),
    *("#14161a", "#4fd1a5", "#ef9bc9", "#e6d36a", "#a9a6ff", "#f4f4f2"),
)
"""The colours of the dark theme, in the order of the light theme's."""
TEXT = {"labelColor": SOFT, "titleColor": SOFT, "labelFontSize": 12, "titleFontSize": 12}
TEXT |= {"titleFontWeight": "normal", "labelLimit": 260}
STROKES = {"symbolType": "stroke", "symbolStrokeWidth": 2, "symbolSize": 200}
CONFIG: dict[str, Json] = {
    "aria": False,
    "background": PAPER,
    "view": {"stroke": None},
    "axis": {**TEXT, "gridColor": GRID, "domainColor": LINE, "tickColor": LINE, "labelPadding": 5},
    "axisQuantitative": {"tickCount": 5, "labelOverlap": True},
    "axisXQuantitative": {"grid": False},
    "axisYDiscrete": {"grid": True, "ticks": False, "domain": False},
    "legend": {**TEXT, **STROKES, "orient": "bottom", "columns": 2, "titleLimit": 320},
    "title": {"color": SOFT, "anchor": "start", "fontSize": 12, "fontWeight": "normal"},
    "line": {"strokeWidth": 2},
    "rule": {"strokeWidth": 2},
    "tick": {"thickness": 1.2},
    "point": {"size": 60, "opacity": 1, "strokeWidth": 2},
    "rect": {"stroke": GRID, "strokeWidth": 0.5},
}
DIGITS = 4  # of a number in a chart
ROW = 24  # height of an arm, in pixels
CLEAR = ("higher", "lower")
MAX_STEPS = 60  # of a curve: more are not seen
MAX_SEEDS = 400  # curves of single seeds, over all arms and metrics
MAX_INTERVALS = 24  # of steps, in a map of effects
MIN_FOR_BAND = 3  # seeds
LOG_KEYS = ("run", "arm", "seed", "state", "step")
SCALES = ("linear", "log")
LABELS = {number.name: number.label for number in EFFECT_NUMBERS}
MEASURES = {"cosine": LABELS["cosine"], "ratio": "norm ratio"}
MEASURES |= {name: LABELS[name] for name in ("changed", "flipped", "zeroed")}
"""The measures of a map of effects, with their labels."""


def finished(chart: Chart, text: str, height: Json = 220, heading: Json = None) -> Chart:
    """Return a chart with the style of all, and a text for those who cannot see it."""
    above = {"title": heading} if heading else {}
    return chart.properties(description=text, width=480, height=height, **above).configure(**CONFIG)


def inline(frame: pl.DataFrame, by: Sequence[str] = ()) -> alt.Data:
    """Return a frame as data of a chart, with few digits.

    With `by`, all rows of a group are one row of lists, which `transform_flatten` separates: keys
    and names are written once.
    """
    floats = [name for name, kind in frame.schema.items() if kind.is_float()]
    few = (pl.when(pl.col(k).is_finite()).then(pl.col(k).round_sig_figs(DIGITS)) for k in floats)
    frame = frame.with_columns(few)
    if by:
        frame = frame.group_by(by, maintain_order=True).agg(pl.all())
    return alt.Data(values=frame.to_dicts())


def choice(name: str, label: str, options: Iterable[Json], labels: Sequence[str] = ()) -> Json:
    """Return a parameter with a drop-down list, without one if there is a single option."""
    values = list(options)
    if len(values) < 2:
        return alt.param(name=name, value=values[0] if values else "")
    bind = alt.binding_select(options=values, labels=labels or alt.Undefined, name=f"{label} ")
    return alt.param(name=name, value=values[0], bind=bind)


def label_of(metric: str, unit: str = "%") -> str:
    """The title of a metric with its unit: `test accuracy (pp)` for differences."""
    return f"{title(metric)} ({unit})" if is_share(metric) else title(metric)


def short(number: float | None) -> float | None:
    """A number with few digits, None for NaN and infinity."""
    return None if number is None or not isfinite(number) else float(f"{number:.{DIGITS}g}")


def _factor(metric: str) -> int:
    return 100 if is_share(metric) else 1


def _when(test: str, yes: Json, no: Json) -> Json:
    yes, no = (one if isinstance(one, alt.Color) else alt.value(one) for one in (yes, no))
    return alt.condition(test, yes, no)


def _zero(channel: str) -> alt.Chart:
    """A dashed line where nothing would have changed."""
    rule = alt.Chart(alt.sequence(1)).mark_rule(color=SOFT, strokeDash=[2, 2], strokeWidth=1)
    return rule.encode(**{channel: alt.datum(0)})


def _drawn(frame: pl.DataFrame, name: str) -> tuple[pl.DataFrame, list[str]]:
    """Return the comparisons with a difference, shares in percentage points, and their metrics."""
    known = frame.filter(pl.col("difference").is_not_null() & pl.col("block").is_null())
    labels = {key: label_of(key, "pp") for key in known["metric"].unique(maintain_order=True)}
    numbers = ("difference", "low", "high", "differences")
    shares = pl.when(pl.col("metric").is_in([*filter(is_share, labels)])).then(100.0).otherwise(1.0)
    rows = known.select(
        name,
        pl.col("metric").replace(labels),
        *(pl.col(number) * shares for number in numbers),
        pl.col("seeds").fill_null([]),
        is_clear=pl.col("verdict").is_in(CLEAR),
        is_range=pl.col("interval").eq_missing(pl.lit("range")),
    )
    return rows, list(labels.values())


def _tips(*names: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:Q", format=".4~g") for name in names]


DIFFERENCES = alt.Axis(labelExpr="datum.value ? format(datum.value, '+.3~g') : '0'")


def outcome_chart(frame: pl.DataFrame) -> Chart:
    """The forest plot of a comparison in one metric: difference, interval and seeds of each arm.

    A range is dashed, a clear difference is filled.
    """
    if frame.filter(pl.col("block").is_null()).select("n", "planned").n_unique() > 1:
        frame = frame.with_columns(pl.format("{} (n = {})", "arm", "n").alias("arm"))
    rows, (metric, *_) = _drawn(frame, "arm")
    color, fill = (_when("datum.is_clear", TREATED, other) for other in (UNCLEAR, PAPER))
    dash = _when("datum.is_range", [4, 3], [1, 0])
    y, base = alt.Y("arm:N", sort=None, title=None), alt.Chart()
    scale, about = alt.Scale(zero=False), f"difference in {metric}"
    low, one, middle = (
        alt.X(f"{key}:Q", scale=scale, title=about, axis=DIFFERENCES)
        for key in ("low", "differences", "difference")
    )
    seeds = base.transform_flatten(["differences"]).mark_tick(size=8, yOffset=7, color=SOFT)
    chart = alt.layer(
        base.mark_rule().encode(low, y, x2="high:Q", color=color, strokeDash=dash),
        _zero("x"),
        seeds.encode(one, y),
        base.mark_point().encode(middle, y, stroke=color, fill=fill),
        data=inline(rows.drop("metric", "seeds")),
    )
    return finished(chart, f"{about} of {len(rows)} arms with their intervals", alt.Step(ROW))


def _of_metric(chart: Json, metrics: Sequence[str]) -> Json:
    chosen = choice("metric", "Metric", metrics)
    return chart.transform_filter("datum.metric == metric").add_params(chosen)


def _value_axis(values: pl.Series, key: str) -> alt.X:
    """The axis of a hyperparameter; by logarithm if its values are of several sizes."""
    if not values.dtype.is_numeric():
        return alt.X(f"{values.name}:N", sort=None, axis=alt.Axis(labelAngle=0), title=key)
    every = sorted(set(values))
    by_log = every[0] > 0 and every[-1] >= 10 * every[0]
    kind: Json = {"type": "log"} if by_log else {"type": "linear", "zero": False}
    return alt.X(
        f"{values.name}:Q",
        scale=alt.Scale(**kind, nice=False, padding=14),
        axis=alt.Axis(format="~g", values=every),
        title=f"{key}{' (log scale)' if by_log else ''}",
    )


def dose_chart(doses: pl.DataFrame) -> Chart:
    """The difference to the control over the one number in which arms differ.

    `doses` are rows of one transform and key: a line for each other setting, as the optimizer.
    """
    label, key = doses["label"][0], doses["key"][0]
    rows, metrics = _drawn(doses, "name")
    rows = rows.drop("differences", "seeds").with_columns(doses["dose"])
    x, base = _value_axis(doses["dose"], key), alt.Chart()
    color, _ = _looks(rows["name"].unique(maintain_order=True).to_list(), column="name")
    mean, low = (alt.Y(f"{part}:Q", title=None, axis=DIFFERENCES) for part in ("difference", "low"))
    tips = ["name:N", *_tips("dose", "difference", "low", "high")]
    layers = alt.layer(
        base.mark_line().encode(x, mean, color=color),
        _zero("y"),
        base.mark_rule(strokeOpacity=0.6).encode(x, low, y2="high:Q", color=color),
        base.mark_point(filled=True).encode(x, mean, color=color, tooltip=tips),
        data=inline(rows),
    )
    heading = alt.Title(alt.ExprRef(f"{json.dumps(label)} + ': difference in ' + metric"))
    about = f"{label}: difference in {metrics[0]} over {key}"
    return finished(_of_metric(layers, metrics), about, heading=heading)


def tuning_chart(rows: pl.DataFrame) -> Chart:
    """The score of each arm on validation data over the values of one tuned key.

    A row is a seed: arm, key, metric, value, seed, score (null if it diverged), is_chosen.
    """
    metric, key = rows["metric"][0], rows["key"][0]
    rows = rows.with_columns(pl.col("score") * _factor(metric))
    means = rows.group_by("arm", "value", "is_chosen", maintain_order=True).agg(
        pl.col("score").mean().alias("mean"), pl.col("score").null_count().alias("diverged")
    )
    low, high = curve_limits(means["mean"].drop_nulls())
    means = means.with_columns(pl.col("mean").fill_null(high))  # no seed is left: at the edge
    x, (color, _) = _value_axis(rows["value"], key), _looks(rows["arm"].unique().sort().to_list())
    scale, label = alt.Scale(domain=[low, high], nice=False, clamp=True), label_of(metric)
    score, mean = (alt.Y(f"{name}:Q", title=label, scale=scale) for name in ("score", "mean"))
    base, tips = alt.Chart(inline(means)), ["arm:N", "value:N", *_tips("mean", "diverged")]
    shape = _when("datum.diverged > 0", "cross", "circle")
    seeds = alt.Chart(inline(rows)).mark_point(size=18, filled=True, opacity=0.55)
    chosen = base.transform_filter("datum.is_chosen").mark_point(size=170)
    chart = alt.layer(
        base.mark_line().encode(x, mean, color=color),
        seeds.encode(x, score, color=color),
        base.mark_point(filled=True).encode(x, mean, color=color, shape=shape, tooltip=tips),
        chosen.encode(x, mean, color=color, tooltip=tips),
    )
    return finished(chart, f"{label} over {key}, by arm, on validation data")


def _steps_axis(rows: pl.DataFrame) -> alt.X:
    """The axis of steps; its domain is given, since a layer may have no rows for the choice."""
    scale = alt.Scale(domain=[0, max(rows["step"])], nice=False)
    return alt.X("step:Q", scale=scale, axis=alt.Axis(format="~s"), title="optimizer step")


def _looks(
    names: list[str], controls: Collection[str] = (), column: str = "arm"
) -> tuple[alt.Color, alt.StrokeDash]:
    """Return colour and dash of each arm; all controls have one colour, and are dashed."""
    palette = [colour for colour in TASKS if colour != CONTROL]
    places = {True: count(), False: count()}
    looks = [
        (CONTROL, CONTROL_DASHES[next(places[True]) % len(CONTROL_DASHES)])
        if name in controls
        else (palette[(k := next(places[False])) % 7], DASHES[k // 7 % len(DASHES)])
        for name in names
    ]
    color, dash = (alt.Scale(domain=names, range=[one[k] for one in looks]) for k in (0, 1))
    legend: Json = alt.Legend(title=None) if len(names) > 1 else None
    return (
        alt.Color(f"{column}:N", sort=None, scale=color, legend=legend),
        alt.StrokeDash(f"{column}:N", sort=None, scale=dash, legend=legend),
    )


def curve_metrics(metrics: pl.DataFrame) -> list[str]:
    """The names of the logged metrics, the headline first."""
    known = [name for name in metrics.columns if name not in LOG_KEYS]
    return list(dict.fromkeys([*(name for name in HEADLINE if name in known), *known]))


def has_curves(metrics: pl.DataFrame) -> bool:
    """Return whether a run that has not diverged has a logged number, so that a mean exists."""
    left = metrics.filter(pl.col("state").cast(pl.String) != "diverged")
    return any(left[name].is_not_null().any() for name in curve_metrics(left))


def curve_frames(metrics: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the learning curves of arms, and of single seeds, at no more than 60 steps.

    A mean has the 95 % t interval over at least three seeds; a seed that diverged is in no mean.
    """
    means, seeds = [], []
    metrics = metrics.with_columns(pl.col("run", "arm", "state").cast(pl.String))
    for metric in curve_metrics(metrics):
        named = pl.lit(label_of(metric)).alias("metric")
        value = (pl.col(metric) * _factor(metric)).alias("value")
        rows = metrics.select("run", "arm", named, "seed", "state", "step", value)
        rows = rows.drop_nulls("value").unique(["run", "step"], maintain_order=True)
        place = pl.col("step").rank("dense").over("arm").cast(pl.Int64) - 1
        last = pl.max_horizontal(place.max().over("arm"), MAX_STEPS - 1)
        parts = [(place - k) * (MAX_STEPS - 1) // last for k in (0, 1)]
        rows = rows.filter((place == 0) | (parts[0] > parts[1]))
        seeds.append(rows.drop("run"))
        means.append(_means(rows.filter(pl.col("state") != "diverged")))
    return pl.concat(means), pl.concat(seeds)


def _means(rows: pl.DataFrame) -> pl.DataFrame:
    """The mean of each arm at each step, with its t interval."""
    mean, sd, n = pl.col("value").mean(), pl.col("value").std(), pl.len()
    means = rows.group_by("arm", "metric", "step", maintain_order=True).agg(mean=mean, sd=sd, n=n)
    reach = {n: t_critical(n) / sqrt(n) for n in set(means["n"]) if n >= MIN_FOR_BAND}
    room = pl.col("sd") * pl.col("n").replace_strict(reach, default=None, return_dtype=pl.Float64)
    means = means.with_columns(low=pl.col("mean") - room, high=pl.col("mean") + room).drop("sd")
    return means.sort("arm", "step", maintain_order=True)


def curve_limits(numbers: pl.Series, by_log: bool = False) -> tuple[float, float]:
    """Return limits of an axis that leave out numbers far from most others."""
    known = numbers.filter(numbers.is_finite())
    known = known.filter(known > 0).log(10) if by_log else known
    if known.is_empty():
        return 0.0, 1.0
    ends = (known.quantile(part, "nearest") for part in (0, 0.1, 0.9, 1))
    least, first, end, most = (float(number or 0) for number in ends)
    room = (10 if by_log else 2) * (end - first) or 1.0
    low, high = max(least, first - room), min(most, end + room)
    pad = 0.03 * ((high - low) or abs(high) or 1)
    return (low - pad if by_log or low < 0 else max(0.0, low - pad)), high + pad


ON = "(arm == '' || arm == datum.arm)"
"""Whether the arm of a row is chosen."""


def curves_chart(metrics: pl.DataFrame, controls: Collection[str]) -> Chart:
    """The learning curves of all arms; metric, scale and arm are chosen in the chart.

    `controls` are the names of the control arms. Only the chosen arm shows its seeds, and all
    seeds that diverged.
    """
    means, seeds = curve_frames(metrics)
    arms = sorted(means["arm"].unique(maintain_order=True), key=lambda arm: arm in controls)
    names = means["metric"].unique(maintain_order=True).to_list()
    ends = means.unpivot(["mean", "low", "high"], index="metric").drop_nulls()
    drawn = {name: ends.filter(pl.col("metric") == name)["value"] for name in names}
    limits = {
        name: {scale: curve_limits(values, scale == "log") for scale in SCALES}
        for name, values in drawn.items()
    }
    chart = _curve_layers(means, seeds, *_looks(arms, controls))
    heading = alt.Title(alt.ExprRef("metric + (scale == 'log' ? ' (log scale)' : '')"))
    chart = chart.add_params(
        alt.param(name="limits", value=limits),
        alt.param(name="arms", value=len(arms)),
        choice("metric", "Metric", names),
        choice("arm", "Arm", ["", *arms], ["all", *arms]),
        choice("scale", "Scale", SCALES),
    )
    return finished(chart, f"{names[0]} of all arms over the steps", 300, heading)


def _curve_layers(
    means: pl.DataFrame, seeds: pl.DataFrame, color: alt.Color, dash: alt.StrokeDash
) -> Json:
    base, number = (
        alt.Chart(),
        "format(scale == 'log' ? pow(10, datum.value) : datum.value, '.3~g')",
    )
    ends = [alt.ExprRef(f"limits[metric][scale][{place}]") for place in (0, 1)]
    scale = alt.Scale(domain=ends, nice=False, zero=False)
    x, axis = _steps_axis(means), alt.Axis(labelExpr=number)
    at, low = (alt.Y(f"{name}:Q", title=None, scale=scale, axis=axis) for name in ("at", "from"))
    shown, state = alt.condition(ON, alt.value(1), alt.value(0.15)), "datum.state == 'diverged'"
    tips = ["arm:N", "step:Q", *_tips("mean", "low", "high", "n")]
    one = alt.Chart(inline(_few(seeds), SERIES)).transform_filter("datum.metric == metric")
    one = one.transform_filter(f"{state} || arm == datum.arm || arms < 3")
    one = one.transform_flatten(["step", "value"]).transform_calculate(at=_scaled("value"))
    one = one.mark_line(clip=True, strokeWidth=1, strokeOpacity=0.5)
    band = base.transform_filter(f"isValid(datum.low) && {ON}").mark_area(clip=True)
    alone = base.transform_joinaggregate(points="count()", groupby=["arm"])
    alone = alone.transform_filter("datum.points < 5").mark_circle(size=45, opacity=1)
    runs = ["arm:N", "seed:N"]
    faint = 0.14 if means["arm"].n_unique() < 5 else 0.05
    layers = alt.layer(
        band.encode(x, low, y2="to:Q", color=color, fillOpacity=alt.value(faint)),
        one.encode(x, at, detail=runs, color=_when(state, BAD, color), tooltip=[*runs, "state:N"]),
        base.mark_line(clip=True).encode(x, at, color=color, strokeDash=dash, opacity=shown),
        alone.encode(x, at, color=color),
        base.mark_point(size=80, opacity=0).encode(x, at, tooltip=tips),
        data=inline(means, ["arm", "metric"]),
    )
    layers = layers.transform_filter("datum.metric == metric")
    layers = layers.transform_flatten(["step", "mean", "low", "high", "n"])
    ends = {"from": _scaled("low", "-30"), "to": _scaled("high"), "at": _scaled("mean")}
    return layers.transform_calculate(**ends)


SERIES = ["arm", "metric", "seed", "state"]


def _few(seeds: pl.DataFrame) -> pl.DataFrame:
    """Keep the seeds of as many curves as a page holds, those that diverged first."""
    series = seeds.select(SERIES).unique(maintain_order=True)
    series = series.sort(pl.col("state") != "diverged", maintain_order=True).head(MAX_SEEDS)
    return seeds.join(series, on=SERIES, how="semi", maintain_order="left")


def _scaled(name: str, least: str = "null") -> str:
    """An expression for a number on the chosen scale; `least` stands for numbers without a log."""
    of_log = f"isValid(datum.{name}) && datum.{name} > 0 ? log(datum.{name}) / LN10 : {least}"
    return f"scale != 'log' ? datum.{name} : {of_log}"


def effect_frame(effects: pl.DataFrame, max_cells: int = 8000) -> pl.DataFrame:
    """Return the effects of each arm and transform by site and interval of steps.

    Means over the sampled gradients of a run, then over runs. `step` is the end of an interval;
    the rows without a step are means of the whole training.
    """
    before = pl.col("norm_before")
    ratio = pl.when(before > 0).then(pl.col("norm_after") / before).alias("ratio")
    rows = _named(effects).with_columns(ratio)
    parts = max_cells // max(1, rows.select("name", "site").n_unique())
    parts = pl.min_horizontal(max(4, min(MAX_INTERVALS, parts)), pl.col("step").n_unique())
    width = pl.max_horizontal(pl.col("step").max() / parts, 1).over("name")
    end = ((pl.col("step") / width).ceil().clip(1) * width).round().cast(pl.Int64)
    weight = pl.col("sampled")
    means = [
        (pl.col(key) * weight).sum() / weight.filter(pl.col(key).is_not_null()).sum()
        for key in MEASURES
    ]
    frames = []
    for step in (end, pl.lit(None, pl.Int64)):
        keys = ["name", "site", "step"]
        runs = rows.with_columns(step.alias("step")).group_by(*keys, "run", maintain_order=True)
        numbers = pl.col(list(MEASURES)).fill_nan(None).mean()
        frames.append(
            runs.agg(means).group_by(keys, maintain_order=True).agg(numbers, runs=pl.len())
        )
    return pl.concat(frames)


def _named(effects: pl.DataFrame) -> pl.DataFrame:
    """The measured rows with a `name`: the arm, and the transform where an arm has several."""
    texts = pl.col("run", "arm", "transform", "site").cast(pl.String)
    rows = effects.filter(pl.col("sampled") > 0).with_columns(texts)
    several = rows.select("arm", "transform").n_unique() > rows["arm"].n_unique()
    both = pl.concat_str("arm", "transform", separator=": ")
    return rows.with_columns((both if several else pl.col("arm")).alias("name"))


SHADE = "(limit.is_log ? log(datum.number) / LN2 : datum.number - limit.none) / limit.reach"
BACK = "limit.is_log ? pow(2, datum.value * limit.reach) : limit.none + datum.value * limit.reach"
BACK = f"format({BACK}, '.2~g')"
"""A number as a shade from -1 to 1, whose zero is no change, and the way back for the legend."""


def _scale_of(measure: str, numbers: Json) -> dict[str, Json]:
    """The number that means no change, and the largest change that has a shade of its own."""
    known = numbers.filter(numbers.is_finite())
    if measure == "ratio":
        sizes = known.filter(known > 0).log(2).abs()
        return {"is_log": True, "reach": short(min(6.0, max(0.5, sizes.max() or 0)))}
    none = 1 if measure == "cosine" else 0
    reach = max(0.1 if none else 0.01, (known - none).abs().max() or 0)
    return {"none": none, "reach": short(reach if none else -reach)}


def effect_map(frame: pl.DataFrame) -> Chart:
    """The effect at each site over the steps as colours; arm and measure are chosen in the chart.

    `frame` is from `effect_frame`. A colour means the same in all arms; without one, no change.
    """
    cells = frame.filter(pl.col("step").is_not_null()).drop("runs")
    limits = {label: _scale_of(key, cells[key]) for key, label in MEASURES.items()}
    legend = alt.Legend(orient="top", title=None, gradientLength=220, labelExpr=BACK)
    both = alt.ExprRef("limit.is_log ? 1 : 0.001")
    scale = alt.Scale(domain=[-1, 0, both], range=[TREATED, PAPER, CONTROL], interpolate="rgb")
    axis = alt.Axis(labelOverlap=True, labelAngle=0)
    x = alt.X("step:O", title="up to optimizer step", axis=axis)
    y = alt.Y("site:N", sort=None, title=None, axis=alt.Axis(grid=False))
    base = alt.Chart(inline(cells.rename(MEASURES), ["name", "site"]))
    base = base.transform_filter("datum.name == arm")
    base = base.transform_flatten(["step", *MEASURES.values()])
    base = base.transform_calculate(number="datum[measure]")
    base = base.transform_filter("isValid(datum.number)").transform_calculate(shade=SHADE)
    color = alt.Color("shade:Q", scale=scale, legend=legend)
    chart = base.mark_rect().encode(x, y, color, tooltip=["site:N", "step:O", *_tips("number")])
    chart = chart.add_params(
        choice("arm", "Arm", cells["name"].unique(maintain_order=True)),
        choice("measure", "Measure", MEASURES.values()),
        alt.param(name="limits", value=limits),
        alt.param(name="limit", expr="limits[measure]"),
    )
    rows = alt.Step(13 if cells["site"].n_unique() > 40 else 22)
    return finished(chart, "Effect of each transform at each site, over the steps", rows)
