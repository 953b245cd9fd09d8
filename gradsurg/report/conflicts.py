"""Conflicts between tasks: means over steps and runs, in sentences, tables and charts."""

from textwrap import fill
from typing import Any

import altair as alt
import polars as pl

from gradsurg.effects.numbers import CONFLICT_NUMBERS, CONFLICT_TASK_NUMBERS
from gradsurg.effects.tables import aligned
from gradsurg.report.charts import CONFIG, DASHES, TASKS, choice, finished, inline
from gradsurg.report.page import Section, frame_table
from gradsurg.report.study import Study
from gradsurg.report.wording import count, filled, listed
from gradsurg.stats import t_critical

HIDDEN = ("condition", "weight_entropy")  # in the Parquet file, in no table
SINGLE = {one.label: one.name for one in CONFLICT_NUMBERS if one.name not in HIDDEN}
OF_TASKS = {one.label: one.name for one in CONFLICT_TASK_NUMBERS}
COSINE, LOST, OTHERS, WEIGHT_OF = "cosine", "would have lost", "others", "weight of "
SHARES = [LOST, *(one.label for one in CONFLICT_NUMBERS if one.unit == "fraction")]
ROUNDING = 1e-6  # of a cosine, in float32
FEW_PAIRS, MAX_PAIRS, EXTREMES, MAX_TASKS = 6, 28, 3, 8  # 28 pairs: all of eight tasks
MAX_BESIDE, MAX_ARMS, INTERVALS = 4, 12, 30
GROUP = ("arm", "group")
STEP = ("at", "run", *GROUP, "end")
MAX_STEPS = 2000  # of which all numbers are in memory at a time
NARROW = 18  # columns of an arm beside others
LONGER = 1.25
HOW = (
    "would have lost: the share of the measured steps at which the update, to first order and "
    "beyond rounding, raises the loss of the task; decrease: by how much a plain step lowers the "
    "loss of a task, to first order and a learning rate of 1 (at the representation: if that "
    "itself moved)."
)


def conflict_means(study: Study) -> pl.DataFrame:
    """Return the mean of each number over the steps of a run and then over runs, and its text.

    A row is an arm, group of parameters, number and item. The item is a pair of tasks (the cosine,
    the least first), another aggregator (the cosine to its update, the nearest first), a task, or
    "" for a single number. A task has norm, weight, decrease, and the share of steps at which the
    update raises its loss to first order. The tasks of an arm conflict most in its group that
    `is_sharpest`.
    """
    steps = _steps(study)
    if steps.is_empty():
        return steps
    means = _means(steps)
    value, number, name = pl.col("value"), pl.col("number"), pl.col("arm").cast(pl.String)
    place = pl.when(number == COSINE).then(value).when(number == OTHERS).then(-value)
    least = value.filter(number == COSINE).min().over(GROUP).fill_null(1)
    sharpest = pl.col("group").sort_by("least", maintain_order=True).first().over("arm")
    texts = [
        f"{mean:.1%}" if label in SHARES else f"{mean:.3g}"
        for label, mean in means.select("number", "value").iter_rows()
    ]
    several = steps["group"].n_unique() > 1
    facts = steps.group_by(GROUP).agg(
        n=pl.col("run").n_unique().cast(pl.String),
        steps=pl.len(),
        tasks=pl.col("tasks").explode().unique(maintain_order=True).str.join(", "),
    )
    means = means.with_columns(least=least).with_columns(
        text=pl.Series(texts),
        title=pl.format("{} at {}", name, "group") if several else name,
        is_control=name.is_in([arm.name for arm in study.arms if arm.is_control]),
        is_sharpest=pl.col("group") == sharpest,
    )
    means = means.sort("arm", place.fill_null(0), maintain_order=True)
    return means.join(facts, on=GROUP, maintain_order="left")


def _steps(study: Study) -> pl.DataFrame:
    """The measured steps in the order of arms, each with the last step of its interval, `end`.

    A `part` has whole arms, and some `MAX_STEPS` steps.
    """
    order = pl.Enum([arm.name for arm in study.arms])
    rows = study.conflicts.with_columns(pl.col("run", "arm").cast(pl.String))
    rows = rows.with_columns(pl.col("arm").cast(order)).with_row_index("at")
    rank = pl.col("step").rank("dense").over(GROUP).cast(pl.Int64) - 1
    end = rank * INTERVALS // pl.max_horizontal(rank.max().over(GROUP) + 1, INTERVALS)
    rows = rows.with_columns(end=end, part=pl.col("at").min().over("arm") // MAX_STEPS)
    return rows.with_columns(end=pl.col("step").max().over(*GROUP, "end"))


def _means(steps: pl.DataFrame, *more: str) -> pl.DataFrame:
    """Means over the steps of each run, then over runs, with their 95 % t interval over runs."""
    by, value = [*GROUP, "number", "item", *more], pl.col("value")
    parts = steps.partition_by("part")
    runs = [
        _long(part).group_by(*by, "run", maintain_order=True).agg(value.mean()) for part in parts
    ]
    reach = {n: t_critical(n) / n**0.5 for n in range(2, steps["run"].n_unique() + 1)}
    half = value.std() * pl.len().replace_strict(reach, default=None, return_dtype=pl.Float64)
    means = pl.concat(runs).group_by(by, maintain_order=True).agg(value.mean(), half=half)
    return means.with_columns(low=value - pl.col("half"), high=value + pl.col("half"))


def _long(steps: pl.DataFrame) -> pl.DataFrame:
    """A row for each step, number and item: a pair of tasks, a task, an aggregator, or none."""
    norms = pl.col("norms")
    length = (norms.list.mean() * pl.col("norm_to_mean")).fill_nan(0).fill_null(0)
    steps = steps.with_columns(excess=pl.col("decrease") + norms * (ROUNDING * length))
    others = [key.split(".")[1] for key in steps.columns if key.endswith(".cosine")]
    one, tasks = (lambda name: pl.concat_list(pl.lit(name))), pl.col("tasks")
    lists = [(tasks, label, key) for label, key in {**OF_TASKS, LOST: "excess"}.items()]
    lists += [(tasks, f"{WEIGHT_OF}{name}", f"others.{name}.weights") for name in others]
    lists += [(one(name), OTHERS, f"others.{name}.cosine") for name in others]
    lists += [(one(""), label, key) for label, key in SINGLE.items()]
    parts = [_pairs(steps)]
    for items, label, key in lists:
        values = pl.col(key) if steps.schema[key] == pl.List else pl.concat_list(key)
        rows = steps.select(*STEP, item=items, number=pl.lit(label), value=values)
        rows = rows.filter(pl.col("item").list.len() == pl.col("value").list.len())
        parts.append(rows.explode("item", "value"))
    rows = pl.concat(parts).filter(pl.col("value").is_finite())
    raised = (pl.col("value") < 0).cast(pl.Float64)
    raised = pl.when(pl.col("number") == LOST).then(raised).otherwise("value")
    return rows.with_columns(raised.alias("value"))


def _pairs(steps: pl.DataFrame) -> pl.DataFrame:
    """The cosine of the gradients of each task and each later one."""
    place = pl.int_ranges(1, pl.col("tasks").list.len() + 1)
    rows = steps.select(*STEP, "tasks", "cosines", task="tasks", place=place)
    rows = rows.explode("task", "place", "cosines")
    later = (pl.col(name).list.slice("place") for name in ("tasks", "cosines"))
    rows = rows.with_columns(*later).explode("tasks", "cosines")
    pair = pl.format("{} ~ {}", "task", "tasks")
    return rows.select(*STEP, item=pair, number=pl.lit(COSINE), value="cosines")


def conflict_tables(study: Study) -> list[tuple[str, pl.DataFrame]]:
    """Return tables with their captions: an arm a row, a task a row, another aggregator a row.

    An arm's row shows its group with the sharpest conflict, and the task, of all its groups, that
    was lost most often.
    """
    means = conflict_means(study)
    if means.is_empty():
        return []
    number, text, sharp = pl.col("number"), pl.col("text"), means.filter("is_sharpest")
    cosines = sharp.filter(number == COSINE)
    pairs = cosines.filter(pl.col("arm") == means["arm"][0])["item"].to_list()
    pairs = pairs if len(pairs) <= FEW_PAIRS else [*pairs[:EXTREMES], pairs[-1]]
    told = pl.concat([cosines.with_columns(number=pl.format("cosine {}", "item")), sharp])
    arms = _wide(told, ["title", "n", "arm"], [*(f"cosine {pair}" for pair in pairs), *SINGLE])
    lost = means.filter(number == LOST, pl.col("value") > 0)
    lost = lost.sort("value", descending=True, maintain_order=True).unique("arm", keep="first")
    place = pl.when("is_sharpest").then(pl.lit(" ")).otherwise(pl.format(" at {} ", "group"))
    lost = lost.select("arm", pl.concat_str("item", place, "text").alias("most often lost"))
    arms = arms.join(lost, on="arm", how="left", maintain_order="left").fill_null("none")
    tasks = _wide(means, ["title", "item"], [*OF_TASKS, LOST])
    weights = sharp.filter(number.str.starts_with(WEIGHT_OF))
    weights = weights.group_by("arm", item=number.str.strip_prefix(WEIGHT_OF)).agg(
        weights=pl.when(pl.len() <= MAX_TASKS).then(text.str.join(", "))
    )
    others = sharp.filter(~pl.col("is_control"), number == OTHERS)
    others = others.join(weights, on=["arm", "item"], how="left", maintain_order="left")
    others = others.select(arm="title", aggregator="item", cosine="text", weights=pl.col("weights"))
    tables = {
        "Conflict of each arm": arms.drop("arm").rename({"title": "arm"}),
        "Tasks": tasks.rename({"title": "arm", "item": "task"}),
        "Updates of other aggregators from the same gradients": others,
    }
    return [(caption, frame) for caption, frame in tables.items() if len(frame)]


def _wide(rows: pl.DataFrame, index: list[str], heads: list[str]) -> pl.DataFrame:
    """A column with the text of each number, `-` where it is not known."""
    rows = rows.filter(pl.col("number").is_in(heads))
    texts = {head: pl.col("text").filter(pl.col("number") == head).first() for head in heads}
    wide = rows.group_by(index, maintain_order=True).agg(**texts)
    return wide.with_columns(pl.col(heads).fill_null("-"))


def conflict_text(study: Study) -> str:
    """Return the arms side by side, their tasks, and the other aggregators; empty without any."""
    tables = [frame for _, frame in conflict_tables(study)]
    if not tables:
        return ""
    arms, tasks, *others = tables
    means = conflict_means(study)
    first = means.filter(pl.col("arm") == means["arm"][0])
    sharp = first.filter("is_sharpest")
    counts = (
        (len(sharp.filter(number=COSINE)), FEW_PAIRS, "pairs the extremes"),
        (len(sharp.filter(number="norm")), MAX_TASKS, "tasks those that gain least and most"),
        (first["group"].n_unique(), 1, "groups the one with the sharpest conflict"),
        (len(arms), MAX_BESIDE, f"arms the first {MAX_BESIDE}"),
    )
    caption = f"How the tasks conflict, means over {count(sharp['steps'][0], 'measured step')} of "
    caption += count(int(sharp["n"][0]), "run")
    caption += "".join(f"; of {found} {which}" for found, most, which in counts if found > most)
    shown = arms.head(MAX_BESIDE)
    heads, *rows = zip(arms.columns, *shown.rows(), strict=True)
    beside = [[fill(name, NARROW, break_long_words=False) for name in heads], *rows]
    cells = [tasks.columns]
    for part in tasks.filter(pl.col("arm").is_in(shown["arm"].to_list())).partition_by("arm"):
        mine = part.rows()
        if len(mine) > MAX_TASKS:  # those that gain least and most
            mine = part.sort(pl.col("decrease").cast(pl.Float64, strict=False)).rows()
            mine = [*mine[:EXTREMES], *mine[-EXTREMES:]]
        cells += [[row[0] * (row is mine[0]), *row[1:]] for row in mine]
    parts = [filled(f"{caption}:"), aligned(beside), aligned(cells, left=2), filled(HOW)]
    return "\n\n".join([*parts, *(_about_others(shown["arm"][0], frame) for frame in others)])


def _about_others(arm: str, others: pl.DataFrame) -> str:
    """A sentence on the updates of the other aggregators, the nearest first."""
    named = others.filter(arm=arm).group_by("cosine", maintain_order=True)
    named = named.agg(pl.col("aggregator").str.join(", "))
    text = "; ".join(f"{cosine} {names}" for cosine, names in named.iter_rows())
    what = f"What the others would have done, cosine to the update of {arm}"
    return filled(f"{what}: {text}.")


def about_lengths(study: Study) -> list[str]:
    """Return a caution if updates are over 1.25 times as long as the control's, or as short."""
    means = conflict_means(study)
    if means.is_empty():
        return []
    rows = means.filter("is_sharpest", number="norm to mean")
    controls = rows.filter("is_control").unique(["group", "tasks"], keep="last")
    rows = rows.filter(~pl.col("is_control")).join(controls, on=["group", "tasks"])
    rows = rows.sort("arm").select("arm", ratio=pl.col("value") / pl.col("value_right"))
    rows = rows.filter(~pl.col("ratio").is_between(1 / LONGER, LONGER))
    ratios = [f"{ratio:.2g} ({arm})" for arm, ratio in rows.iter_rows()]
    told = [
        f"Relative to the mean gradient, updates are {listed(ratios)} times as long as the "
        "control's, which acts like another learning rate: control=norm_matched compares "
        "directions alone, or a learning rate of its own for what weighs losses."
    ]
    return told if ratios else []


def conflict_charts(study: Study, facet: bool = False) -> dict[str, Any]:  # Any: kinds of charts
    """Return the cosines of pairs, weights and decreases of tasks over the steps, by a file's name.

    The arm is chosen in the chart; with `facet`, for a file, each arm has a panel.
    """
    means = conflict_means(study)
    if means.is_empty():
        return {}
    means = means.filter("is_sharpest")
    panel = pl.format("{}, n = {}", pl.col("arm").cast(pl.String), "n")
    arms = means.select(*GROUP, panel=panel).unique(maintain_order=True).head(MAX_ARMS)
    first = means.filter(pl.col("arm") == means["arm"][0])
    steps = _steps(study).join(arms, on=GROUP, how="semi", maintain_order="left")
    rows = _means(steps, "end").join(arms, on=GROUP)
    pairs = means.filter(number=COSINE)["item"].unique(maintain_order=True).head(MAX_PAIRS)
    tasks = first.filter(number="norm")["item"].to_list()
    if len(tasks) > MAX_TASKS:  # those that gain least and most
        tasks = first.filter(number="decrease").sort("value")["item"].to_list()
        tasks = [*tasks[: MAX_TASKS // 2], *tasks[-MAX_TASKS // 2 :]]
    charts: dict[str, Any] = {"conflicts": _cosines(rows.filter(number=COSINE), pairs.to_list())}
    for number in ("weight", "decrease"):
        charts[f"conflict-{number}"] = _lines(rows.filter(number=number), tasks, number)
    names = arms["panel"].to_list()
    panels = alt.Facet("panel:N", sort=names, title=None)
    arm = choice("arm", "Arm", names)
    for name, chart in charts.items():
        if facet:
            charts[name] = chart.facet(panels, columns=3).configure(**CONFIG)
        else:
            about = f"{name} of the tasks of each arm over the steps"
            one = chart.transform_filter("datum.panel == arm").add_params(arm)
            charts[name] = finished(one, about, chart.height)
    return charts


def _cosines(rows: pl.DataFrame, pairs: list[str]) -> alt.Chart:
    rows = rows.filter(pl.col("item").is_in(pairs)).select("panel", "item", "end", "value")
    reach = max([0.2, *rows["value"].abs()])
    scale = alt.Scale(scheme="purpleorange", reverse=True, domain=[-reach, reach])
    legend = alt.Legend(title="cosine of two gradients", orient="bottom", format=".2~g")
    axis = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)
    rows_axis = alt.Axis(domain=False, ticks=False, grid=False)
    chart = alt.Chart(inline(rows)).mark_rect(stroke=None)
    return chart.properties(width=250, height=alt.Step(18)).encode(
        alt.X("end:O", title="up to optimizer step", axis=axis),
        alt.Y("item:N", sort=pairs, title=None, axis=rows_axis),
        alt.Color("value:Q", scale=scale, legend=legend),
        tooltip=["item:N", "end:O", alt.Tooltip("value:Q", title="cosine", format=".3~g")],
    )


def _lines(rows: pl.DataFrame, tasks: list[str], number: str) -> Any:  # Any: a chart
    """A line for each task with its interval."""
    columns = ["panel", "item", "end", "value", "low", "high"]
    rows = rows.filter(pl.col("item").is_in(tasks)).select(columns)
    legend = alt.Legend(title=None, orient="bottom", columns=4, symbolOpacity=1)
    looks = ({"domain": tasks, "range": [*kind][: len(tasks)]} for kind in (TASKS, DASHES * 2))
    color, dash = (alt.Scale(**look) for look in looks)
    axis = alt.Axis(format="~s", tickCount=4, grid=False)
    step = alt.X("end:Q", title="optimizer step", axis=axis)
    base = alt.Chart().encode(step, color=alt.Color("item:N", scale=color, legend=legend))
    line = base.mark_line(point={"size": 20}).encode(
        alt.Y("value:Q", title=number, axis=alt.Axis(tickCount=4)),
        strokeDash=alt.StrokeDash("item:N", scale=dash, legend=legend),
        tooltip=["item:N", "end:Q", "value:Q", "low:Q", "high:Q"],
    )
    band = base.mark_area(opacity=0.1).encode(alt.Y("low:Q"), alt.Y2("high"))
    return alt.layer(band, line, data=inline(rows)).properties(width=250, height=170)


def sections(study: Study) -> list[Section]:
    """Return the section of the page, if the study has conflicts."""
    charts = list(conflict_charts(study).values())
    frames = enumerate(conflict_tables(study))
    tables = [frame_table(*table, is_open=place == 0) for place, table in frames]
    section = Section("conflicts", "Conflict between the tasks", HOW, charts, tables)
    return [section] if charts else []
