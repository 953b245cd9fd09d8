"""Charts of outcomes: forest plot, dose and response, cost, trade-off between tasks."""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import altair as alt

from gradsurg.report.charts import (
    CONTROL,
    INK,
    PAPER,
    ROW,
    SOFT,
    TASKS,
    TREATED,
    UNCLEAR,
    Columns,
    Panel,
    Spec,
    columns_of,
    scale_of,
    short,
    spec_of,
    zero_line,
)
from gradsurg.report.compare import Cost, Doses, Outcome
from gradsurg.report.load import Arm
from gradsurg.report.pareto import Front, clusters, ends_of
from gradsurg.report.wording import amount, interval, is_share, p_text, title
from gradsurg.stats import CLEAR
from gradsurg.training.run_directory import UNTIL, UNTIL_REACHED, UNTIL_STEP

MAX_PAIRS = 6  # of tasks whose trade-off is drawn


def outcome_panel(
    outcomes: Sequence[Outcome], metric: str, name: Callable[[Outcome], str] | None = None
) -> Panel:
    """The forest plot of a metric: difference, interval and seeds of each arm, or link."""
    sizes = {(one.difference.n if one.difference else 0, one.planned) for one in outcomes}
    same = len(sizes) == 1 and min(sizes)[0] == min(sizes)[1]
    label = name or (_arm if same else _arm_with_n)
    low, high = limits_of(outcomes)
    data = _differences(outcomes, label, low, high)
    texts = [
        f"{label(one)}: {amount(metric, one.difference.mean)}" for one in outcomes if one.difference
    ]
    return Panel(
        title(metric),
        f"Difference in {title(metric)} with 95 % intervals. {'; '.join(texts)}",
        _forest_view(_difference_title(metric, f"n = {min(sizes)[0]}" if same else "")),
        data,
        {"low": low, "high": high, "arms": data["arms"]["arm"]},
        width=260,
        height=ROW * len(outcomes),
    )


def limits_of(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Limits with room for all means and seeds.

    An interval may take half of their span more at each end; beyond that it is cut.
    """
    differences = [outcome.difference for outcome in outcomes if outcome.difference]
    seen = [0.0, *(value for outcome in outcomes for value in outcome.differences)]
    ends = [end for one in differences for end in (one.low, one.high) if end is not None]
    room = (max(seen) - min(seen)) / 2
    low = max(min(seen) - room, min([*ends, *seen]))
    high = min(max(seen) + room, max([*ends, *seen]))
    pad = 0.04 * ((high - low) or 1)
    return low - pad, high + pad


def _differences(
    outcomes: Sequence[Outcome], label: Callable[[Outcome], str], low: float, high: float
) -> dict[str, Columns]:
    arms, seeds, cuts = [], [], []
    for outcome in outcomes:
        name, paired = label(outcome), outcome.difference
        ends = (paired.low, paired.high) if paired else (None, None)
        clear = outcome.reading in CLEAR
        inside = [None if end is None else short(min(max(end, low), high), 6) for end in ends]
        mean = short(paired.mean, 6) if paired else None
        texts = (_said(outcome), interval(outcome.metric, paired) if paired else "")
        arms.append((name, mean, *inside, clear, *texts))
        for end, limit, shape in zip(ends, (low, high), ("left", "right"), strict=True):
            if end is not None and not low <= end <= high:
                cuts.append((name, limit, f"triangle-{shape}", clear))
        for seed, difference in zip(outcome.seeds, outcome.differences, strict=True):
            seeds.append((name, seed, short(difference, 6)))
    return {
        "arms": columns_of(("arm", "mean", "from", "to", "clear", "said", "interval"), arms),
        "seeds": columns_of(("arm", "seed", "difference"), seeds),
        "cuts": columns_of(("arm", "at", "shape", "clear"), cuts),
    }


@cache
def _forest_view(axis_title: str) -> Spec:
    arms, seeds, cuts = (alt.Chart(alt.NamedData(name)) for name in ("arms", "seeds", "cuts"))
    scale = alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False, zero=False)
    axis = _difference_axis(axis_title, tickCount=4, labelOverlap=True)
    x = {"scale": scale, "axis": axis, "title": axis_title}
    y = _arms_axis()
    color = alt.condition("datum.clear", alt.value(TREATED), alt.value(UNCLEAR))
    tips = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("said:N", title="difference"),
        alt.Tooltip("interval:N", title="95 % interval"),
    ]
    layers = alt.layer(
        arms.mark_rule(strokeWidth=2).encode(x=alt.X("from:Q", **x), x2="to:Q", y=y, color=color),
        zero_line("x"),
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
    return spec_of(layers)


def _difference_title(metric: str, more: str = "") -> str:
    notes = ", ".join(part for part in ("percentage points" * is_share(metric), more) if part)
    return f"difference in {title(metric)}{f' ({notes})' if notes else ''}"


def _difference_axis(axis_title: str, **more: Any) -> alt.Axis:  # Any: keywords of alt.Axis
    """An axis of differences; of a share in percentage points, as its title says."""
    if "(percentage points" in axis_title:
        more["labelExpr"] = "format(100 * datum.value, '+.3~g')"
    return alt.Axis(format="+.3~g", **more)


def dose_groups(doses: Sequence[Doses]) -> list[list[Doses]]:
    """The curves that share a panel: those of one transform over one number."""
    groups: dict[tuple[str, str], list[Doses]] = {}
    for one in doses:
        groups.setdefault((one.arms[0].runs[0].label, one.key), []).append(one)
    return list(groups.values())


def dose_panel(group: Sequence[Doses], outcomes: Sequence[Outcome], metric: str) -> Panel:
    """The difference to the control over the one number in which arms differ: a line for each other
    setting, as the optimizer."""
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    shown = [
        (series, dose, by_name[arm.name])
        for series, one in enumerate(group)
        for dose, arm in zip(one.doses, one.arms, strict=True)
        if arm.name in by_name
    ]
    label, key = group[0].arms[0].runs[0].label, group[0].key.rpartition(".")[2]
    names = [one.name.removeprefix(f"{label}, ") for one in group]
    low, high = limits_of([one for *_, one in shown])
    data = _differences([one for *_, one in shown], lambda one: one.arm.name, low, high)
    places = {one.arm.name: (names[series], dose) for series, dose, one in shown}
    for table in (data["arms"], data["cuts"]):
        table["series"] = [places[name][0] for name in table["arm"]]
        table["dose"] = [places[name][1] for name in table["arm"]]
    data["cuts"]["shape"] = [
        shape.replace("left", "down").replace("right", "up") for shape in data["cuts"]["shape"]
    ]
    every = sorted({dose for _, dose, _ in shown})
    by_log = every[0] > 0 and every[-1] >= 10 * every[0]
    sizes = sorted({one.difference.n if one.difference else 0 for *_, one in shown})
    several = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    text = "; ".join(f"{names[k]} {dose:g}: {_said(one)}" for k, dose, one in shown)
    trends = [(name, one.trend(outcomes)) for name, one in zip(names, group, strict=True)]
    rho = [
        f"{f'{name} ' if len(group) > 1 else ''}{trend.correlation:+.2f}, p {p_text(trend.p_value)}"
        for name, trend in trends
        if trend
    ]
    about = f"; Spearman {'; '.join(rho)}" if rho else ""
    head = group[0].name if len(group) == 1 else label
    return Panel(
        f"{head}, n = {several}{about}",
        f"{head}: difference in {title(metric)} over {group[0].key}. {text}",
        _dose_view(_difference_title(metric), key, by_log, len(group) > 1),
        {"arms": data["arms"], "cuts": data["cuts"]},
        {
            "low": low,
            "high": high,
            "first": every[0],
            "most": every[-1],
            "doses": every,
            "series": names,
        },
        width=300,
    )


def _said(outcome: Outcome) -> str:
    if outcome.difference is None:
        return "nothing to compare"
    return amount(outcome.metric, outcome.difference.mean)


@cache
def _dose_view(axis_title: str, key: str, by_log: bool, several: bool) -> Spec:
    arms, cuts = alt.Chart(alt.NamedData("arms")), alt.Chart(alt.NamedData("cuts"))
    x = alt.X(
        "dose:Q",
        scale=scale_of(by_log, padding=14, domain=[alt.ExprRef("first"), alt.ExprRef("most")]),
        axis=alt.Axis(format="~g", values=alt.ExprRef("doses"), grid=False, labelOverlap=True),
        title=key + (" (log scale)" if by_log else ""),
    )
    y = {
        "scale": alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False),
        "axis": _difference_axis(axis_title, tickCount=5),
        "title": axis_title,
    }
    names = alt.Scale(domain=alt.ExprRef("series"), range=list(TASKS))
    legend = alt.Legend(title=None, orient="top", symbolType="stroke") if several else None
    color = alt.Color("series:N", sort=None, scale=names, legend=legend)
    layers = alt.layer(
        arms.mark_line(strokeWidth=2).encode(x=x, y=alt.Y("mean:Q", **y), color=color),
        zero_line("y"),
        arms.mark_rule(strokeWidth=2, strokeOpacity=0.6).encode(
            x=x, y=alt.Y("from:Q", **y), y2="to:Q", color=color
        ),
        cuts.mark_point(size=45, filled=True, opacity=1).encode(
            x=x, y=alt.Y("at:Q", **y), shape=alt.Shape("shape:N", scale=None), color=color
        ),
        arms.mark_point(size=60, opacity=1, strokeWidth=2).encode(
            x=x,
            y=alt.Y("mean:Q", **y),
            stroke=alt.Stroke("series:N", sort=None, scale=names, legend=legend),
            fill=alt.condition(
                "datum.clear", alt.Fill("series:N", scale=names, legend=legend), alt.value(PAPER)
            ),
            tooltip=[
                "series:N",
                alt.Tooltip("dose:Q", title=key),
                alt.Tooltip("said:N", title="difference"),
                alt.Tooltip("interval:N", title="95 % interval"),
            ],
        ),
    )
    return spec_of(layers)


def cost_panel(costs: Sequence[Cost]) -> Panel:
    """Step time over the control's: each pair, their range and their median."""
    alike = len({len(cost.ratios) for cost in costs}) == 1
    names = [cost.arm.name + ("" if alike else f" (n = {len(cost.ratios)})") for cost in costs]
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
    text = "; ".join(f"{name}: {one:g}" for name, one in zip(names, arms["ratio"], strict=True))
    return Panel(
        "",
        f"Step time over the control's. {text}",
        _cost_view(),
        data,
        {"arms": names},
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
    y = _arms_axis()
    tips = ["arm:N", alt.Tooltip("ratio:Q", title="median"), "low:Q", "high:Q"]
    layers = alt.layer(
        arms.mark_rule(strokeWidth=2, color=TREATED).encode(
            x=alt.X("low:Q", **x), x2="high:Q", y=y
        ),
        zero_line("x", at=1),
        pairs.mark_tick(thickness=1.2, size=9, color=TREATED).encode(x=alt.X("ratio:Q", **x), y=y),
        arms.mark_point(size=60, filled=True, opacity=1, color=TREATED).encode(
            x=alt.X("ratio:Q", **x), y=y, tooltip=tips
        ),
    )
    return spec_of(layers)


def reached_panel(arms: Sequence[Arm]) -> Panel | None:
    """The share of each arm's seeds that have reached the stopping condition, over the steps.

    None if no arm has one. A seed that diverged has not reached it.
    """
    rows, texts, until = [], [], ""
    for arm in arms:
        summaries = [run.summary for run in arm.runs if run.summary and UNTIL in run.summary]
        steps = sorted(summary[UNTIL_STEP] for summary in summaries if summary[UNTIL_REACHED])
        if not summaries:
            continue
        until = str(summaries[0][UNTIL])
        last = max(int(summary.get("steps", 0)) for summary in summaries)
        ends = [0, *steps, max([last, *steps])]
        shares = [min(number, len(steps)) / len(summaries) for number in range(len(ends))]
        name = f"{arm.name} (n = {len(summaries)})"
        rows += [
            (name, step, short(share), arm.is_control)
            for step, share in zip(ends, shares, strict=True)
        ]
        texts.append(f"{name}: {len(steps)} of {len(summaries)}")
    if not rows:
        return None
    return Panel(
        f"Seeds that reached {until}",
        f"Share of seeds that reached {until}, over the steps. {'; '.join(texts)}",
        _reached_view(),
        {"reached": columns_of(("arm", "step", "share", "control"), rows)},
        width=340,
        height=220,
    )


@cache
def _reached_view() -> Spec:
    x = alt.X("step:Q", axis=alt.Axis(format="~s", tickCount=5, grid=False), title="optimizer step")
    y = alt.Y(
        "share:Q",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(format="~%", tickCount=5),
        title="seeds that got there",
    )
    chart = alt.Chart(alt.NamedData("reached")).mark_line(
        interpolate="step-after", strokeWidth=2, clip=True
    )
    return spec_of(
        chart.encode(
            x=x,
            y=y,
            color=alt.Color("arm:N", sort=None, scale=alt.Scale(range=list(TASKS)), title=None),
            strokeDash=alt.StrokeDash("control:N", legend=None),
            tooltip=["arm:N", "step:Q", alt.Tooltip("share:Q", format=".0%")],
        )
    )


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
    names = [
        "number",
        "arm",
        "control",
        "best",
        "runs",
        "x",
        "y",
        "x_low",
        "x_high",
        "y_low",
        "y_high",
    ]
    data = {
        "runs": columns_of(("x", "y", "control"), runs),
        "arms": columns_of(names, arms),
        "texts": columns_of(("x", "y", "text"), texts),
    }
    labels = [f"{front.metric} {front.names[task]}" for task in (first, second)]
    summary = "; ".join(f"{row[0]} {row[1]}: {row[5]} and {row[6]}" for row in arms)
    better = "lower left" if front.lower_is_better else "upper right"
    return Panel(
        f"{front.names[first]} and {front.names[second]}, {better} is better",
        f"{labels[1]} over {labels[0]}. {summary}",
        _front_view(labels[0], labels[1], is_share(front.metric), x_log, y_log),
        data,
        {"x_low": x_low, "x_high": x_high, "y_low": y_low, "y_high": y_high},
        height=220,
    )


@cache
def _front_view(x_title: str, y_title: str, share: bool, x_log: bool, y_log: bool) -> Spec:
    def axis(name: str, by_log: bool) -> dict[str, Any]:  # Any: keywords of a channel
        ends = [alt.ExprRef(f"{name}_low"), alt.ExprRef(f"{name}_high")]
        label = (x_title if name == "x" else y_title) + (" (log scale)" if by_log else "")
        return {
            "scale": scale_of(by_log, domain=ends),
            "axis": alt.Axis(format=".2~%" if share else ".3~g", tickCount=5, labelOverlap=True),
            "title": label,
        }

    runs, arms, texts = (alt.Chart(alt.NamedData(name)) for name in ("runs", "arms", "texts"))
    x, y = axis("x", x_log), axis("y", y_log)
    color = alt.condition("datum.control", alt.value(CONTROL), alt.value(TREATED))
    number = ".4~%" if share else ".4~g"
    rule: dict[str, Any] = {"strokeWidth": 1.4, "strokeOpacity": 0.8}  # Any: keywords of a mark
    layers = alt.layer(
        runs.mark_circle(size=16, opacity=1, fillOpacity=0.4).encode(
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
    return spec_of(layers)


def _arm(outcome: Outcome) -> str:
    return outcome.arm.name


def _arm_with_n(outcome: Outcome) -> str:
    number = outcome.difference.n if outcome.difference else 0
    of = "" if number == outcome.planned else f" of {outcome.planned}"
    return f"{outcome.arm.name} (n = {number}{of})"


def of_metric(outcomes: Sequence[Outcome], metric: str) -> list[Outcome]:
    """The outcomes of one metric, in their order."""
    return [outcome for outcome in outcomes if outcome.metric == metric]


def _arms_axis() -> alt.Y:
    """All arms in their order, also arms without a number."""
    names = alt.Scale(domain=alt.ExprRef("arms"))
    axis = alt.Axis(domain=False, ticks=False)
    return alt.Y("arm:N", sort=None, title=None, scale=names, axis=axis)
