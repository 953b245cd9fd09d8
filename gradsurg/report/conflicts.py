"""Conflicts between tasks: means over steps and runs, in sentences, tables and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
SHARES = ("conflict rate", LOST)
ROUNDING = 1e-6  # of a cosine, in float32
FEW_PAIRS, MAX_PAIRS, EXTREMES, MAX_TASKS = 6, 28, 3, 8  # 28 pairs: all of eight tasks
MAX_BESIDE, MAX_ARMS, INTERVALS = 4, 12, 30
STEP = ("at", "run", "arm", "group", "end")
MAX_STEPS = 2000  # of which all numbers are in memory at a time
NARROW = 18  # columns of an arm beside others
LONGER = 1.25
HOW = (
    "would have lost: the share of the measured steps at which the cosine of the task's gradient "
    f"and the update is below {-ROUNDING:g}; decrease: by how much a plain step lowers the loss of "
    "a task, to first order and a learning rate of 1 (at the representation: if that itself moved)."
)


@dataclass(frozen=True)
class Group:
    """The tasks of an arm in one group of parameters: means over steps of a run, then over runs.

    `numbers` have a mean for each pair of tasks (the cosine, the least first), for each task (norm,
    weight, decrease, and the share of steps at which the update, to first order, raises its loss),
    for each other aggregator (the cosine to its update, the nearest first, with a star if it has no
    result at some steps; and its weights), or, under "", a single one.
    """

    arm: str
    is_control: bool
    name: str
    title: str  # of the arm, with the group if there are several
    tasks: list[str]
    measured: list[int]  # steps of each run
    broken: int  # steps with a gradient that is not finite
    numbers: Mapping[str, Mapping[str, float]]

    @property
    def least(self) -> float:
        """The cosine of the two tasks that conflict most."""
        return min(self.numbers[COSINE].values(), default=1.0)

    @property
    def length(self) -> float:
        """The norm of the update, divided by that of the mean gradient."""
        return self.numbers.get("norm to mean", {}).get("") or 1.0

    @property
    def steps(self) -> str:
        """`2 runs, 4 to 6 measured steps each`."""
        least, most, runs = min(self.measured), max(self.measured), len(self.measured)
        steps = f"{least} to " * (least < most) + count(most, "measured step")
        broken = f", of which {self.broken} had a gradient that is not finite, and no number"
        return f"{count(runs, 'run')}, {steps}{' each' * (runs > 1)}{broken * (self.broken > 0)}"

    def text(self, number: str, item: str = "") -> str:
        """A mean with three digits, or as a share; `-` if it is not known."""
        mean = self.numbers.get(number, {}).get(item)
        return "-" if mean is None else f"{mean:.1%}" if number in SHARES else f"{mean:.3g}"


def groups(study: Study) -> list[Group]:
    """Return one for each arm and group of parameters."""
    steps = _steps(study)
    whole = pl.col("norms").list.eval(pl.element().is_finite().fill_null(False)).list.all()
    numbers: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for arm, name, number, item, mean, *_ in _means(steps).iter_rows():
        ours = numbers.setdefault((arm, name), {COSINE: {}, OTHERS: {}})
        ours.setdefault(number, {})[item] = mean
    controls = {arm.name for arm in study.arms if arm.is_control}
    found, several = [], steps["group"].n_unique() > 1
    for (arm, name), rows in steps.group_by("arm", "group", maintain_order=True):
        ours = numbers.get((str(arm), str(name)), {COSINE: {}, OTHERS: {}})
        for number, sign in ((COSINE, 1), (OTHERS, -1)):
            ours[number] = dict(sorted(ours[number].items(), key=lambda one: sign * one[1]))
        tasks = rows["tasks"].explode().unique(maintain_order=True).to_list()
        measured = rows["run"].value_counts()["count"].sort().to_list()
        broken = rows.select((~whole).sum()).item()
        title = f"{arm} at {name}" if several else str(arm)
        told = str(arm), arm in controls, str(name), title
        found.append(Group(*told, tasks, measured, broken, ours))
    return found


def sharpest(found: Sequence[Group]) -> list[Group]:
    """For each arm the group in which its tasks conflict most."""
    arms: dict[str, Group] = {}
    for one in found:
        arms[one.arm] = min(arms.get(one.arm, one), one, key=lambda group: group.least)
    return list(arms.values())


def _means(steps: pl.DataFrame, *more: str) -> pl.DataFrame:
    """The means of all numbers, a few arms at a time: each pair of tasks is a row for each step."""
    arms = steps["arm"].unique(maintain_order=True)
    few = max(1, MAX_STEPS * len(arms) // max(1, len(steps)))
    parts = (arms[start : start + few] for start in range(0, max(1, len(arms)), few))
    return pl.concat(
        _over_runs(_long(steps.filter(pl.col("arm").is_in(part.implode()))), *more)
        for part in parts
    )


def _over_runs(rows: pl.DataFrame, *more: str) -> pl.DataFrame:
    """Means over the steps of each run, then over runs, with their 95 % t interval over runs."""
    by, value = ["arm", "group", "number", "item", *more], pl.col("value")
    runs = rows.group_by(*by, "run", maintain_order=True).agg(value.mean())
    reach = {n: t_critical(n) / n**0.5 for n in range(2, rows["run"].n_unique() + 1)}
    half = value.std() * pl.len().replace_strict(reach, default=None, return_dtype=pl.Float64)
    means = runs.group_by(by, maintain_order=True).agg(value.mean(), half=half)
    return means.with_columns(low=value - pl.col("half"), high=value + pl.col("half"))


def _steps(study: Study) -> pl.DataFrame:
    """The measured steps in the order of arms, each with the last step of its interval, `end`."""
    keys = ("arm", "group")
    rows = study.conflicts.with_columns(pl.col("run", "arm").cast(pl.String))
    order = {arm.name: place for place, arm in enumerate(study.arms)}
    place = pl.col("arm").replace_strict(order, return_dtype=pl.Int64)
    rows = rows.sort(place, maintain_order=True).with_row_index("at")
    rank = pl.col("step").rank("dense").over(keys).cast(pl.Int64) - 1
    part = rank * INTERVALS // pl.max_horizontal(rank.max().over(keys) + 1, INTERVALS)
    rows = rows.with_columns(end=part)
    return rows.with_columns(end=pl.col("step").max().over(*keys, "end"))


def _long(steps: pl.DataFrame) -> pl.DataFrame:
    """A row for each step, number and item: a pair of tasks, a task, an aggregator, or none."""
    pairs = _pairs(steps)
    mean = pairs.group_by("at").agg(length=pl.col("dot").mean().clip(0).sqrt())
    steps = steps.join(mean, on="at", maintain_order="left")
    length = (pl.col("length") * pl.col("norm_to_mean")).fill_nan(0).fill_null(0)
    steps = steps.with_columns(excess=pl.col("decrease") + pl.col("norms") * (ROUNDING * length))
    others = [key.split(".")[1] for key in steps.columns if key.endswith(".cosine")]
    one, tasks = (lambda name: pl.concat_list(pl.lit(name))), pl.col("tasks")
    lists = [(tasks, label, key) for label, key in {**OF_TASKS, LOST: "excess"}.items()]
    lists += [(tasks, f"{WEIGHT_OF}{name}", f"others.{name}.weights") for name in others]
    lists += [(one(name), OTHERS, f"others.{name}.cosine") for name in others]
    lists += [(one(""), label, key) for label, key in SINGLE.items()]
    parts = [pairs.select(*STEP, "item", number=pl.lit(COSINE), value="cosines").drop_nulls("item")]
    for items, label, key in lists:
        values = pl.col(key) if steps.schema[key] == pl.List else pl.concat_list(key)
        rows = steps.select(*STEP, item=items, number=pl.lit(label), value=values)
        rows = rows.filter(pl.col("item").list.len() == pl.col("value").list.len())
        parts.append(rows.explode("item", "value"))
    rows = pl.concat(parts).filter(pl.col("value").is_finite())
    of = pl.col("at").n_unique().over("arm", "group", "number")
    starred = (pl.len().over("arm", "group", "number", "item") < of) & (pl.col("number") == OTHERS)
    raised = (pl.col("value") < 0).cast(pl.Float64)
    return rows.with_columns(
        item=pl.col("item") + pl.when(starred).then(pl.lit("*")).otherwise(pl.lit("")),
        value=pl.when(pl.col("number") == LOST).then(raised).otherwise("value"),
    )


def _pairs(steps: pl.DataFrame) -> pl.DataFrame:
    """Cosine and product of the gradients of each two tasks; only one of both orders is named."""
    place = pl.int_ranges(0, pl.col("tasks").list.len())
    rows = steps.select(*STEP, "tasks", "norms", "cosines", first=place)
    rows = rows.explode("first", "cosines")
    rows = rows.with_columns(second=place).explode("second", "cosines")
    (task, norm), (other, other_norm) = (
        [pl.col(name).list.get(pl.col(end)) for name in ("tasks", "norms")]
        for end in ("first", "second")
    )
    once = pl.when(pl.col("second") < pl.col("first")).then(other + " ~ " + task)
    return rows.with_columns(item=once, dot=pl.col("cosines") * norm * other_norm)


def conflict_text(study: Study) -> str:
    """Return the arms side by side, their tasks, and the other aggregators; empty without any."""
    found = groups(study)
    if not found:
        return ""
    every = sharpest(found)
    shown, first = every[:MAX_BESIDE], every[0]
    pairs = list(first.numbers[COSINE])
    few = pairs if len(pairs) <= FEW_PAIRS else [*pairs[:EXTREMES], pairs[-1]]
    several = sum(one.arm == first.arm for one in found)
    caption = f"How the tasks conflict, means over {first.steps}"
    caption += f"; of {len(pairs)} pairs the extremes" * (len(few) < len(pairs))
    caption += f"; of {several} groups the one with the sharpest conflict" * (several > 1)
    caption += f"; the first {MAX_BESIDE} of {len(every)} arms" * (len(shown) < len(every))
    arms = _arms(found, few).head(MAX_BESIDE)
    cells = [["arm", "task", *OF_TASKS, LOST]]
    for one in shown:
        rows = _tasks([one]).rows()
        if len(rows) > MAX_TASKS:  # those that gain least and most
            rows.sort(key=lambda row: one.numbers.get("decrease", {}).get(row[1], 0.0))
            between = (f".. {len(rows) - 2 * EXTREMES} between ..", *[""] * (len(rows[0]) - 2))
            rows = [*rows[:EXTREMES], ("", *between), *rows[-EXTREMES:]]
        cells += [[row[0] * (row is rows[0]), *row[1:]] for row in rows]
    heads, *rows = zip(arms.columns, *arms.rows(), strict=True)
    heads = [fill(name, NARROW, break_long_words=False) for name in heads]
    tables = [aligned([heads, *rows]), aligned(cells, left=2)]
    return "\n\n".join([filled(f"{caption}:"), *tables, filled(HOW), *_about_others(first)])


def _about_others(one: Group) -> list[str]:
    """A sentence on the updates of the other aggregators, the nearest first."""
    named: dict[str, list[str]] = {}
    for other in one.numbers[OTHERS]:
        named.setdefault(one.text(OTHERS, other), []).append(other)
    text = "; ".join(f"{cosine} {', '.join(names)}" for cosine, names in named.items())
    starred = " *: at some of these steps alone." * ("*" in text)
    what = f"What the others would have done, cosine to the update of {one.arm}"
    return [filled(f"{what}: {text}.{starred}")] if text and not one.is_control else []


def conflict_tables(study: Study) -> list[tuple[str, pl.DataFrame]]:
    """Return tables with their captions: an arm a row, a task a row, another aggregator a row."""
    found = groups(study)
    if not found:
        return []
    others = []
    for one in sharpest(found):
        for name in one.numbers[OTHERS] if not one.is_control else ():
            weights = [one.text(WEIGHT_OF + name.strip("*"), task) for task in one.tasks]
            row = {"arm": one.arm, "aggregator": name, "cosine": one.text(OTHERS, name)}
            others.append({**row, "weights": ", ".join(weights) * (len(weights) <= MAX_TASKS)})
    about = "Updates of other aggregators from the same gradients (*: at some steps alone)"
    tables = {"Conflict of each arm": _arms(found), "Tasks": _tasks(found)}
    return [*tables.items(), *([(about, pl.DataFrame(others))] if others else [])]


def _arms(found: Sequence[Group], pairs: Sequence[str] = ()) -> pl.DataFrame:
    """A row for each arm: its group with the sharpest conflict; the task lost is one of all."""
    rows = []
    for one in sharpest(found):
        pair = next(iter(one.numbers[COSINE]), "")
        lost = {
            f"{task}{f' at {other.name}' * (other is not one)} {other.text(LOST, task)}": share
            for other in found
            if other.arm == one.arm
            for task, share in other.numbers.get(LOST, {}).items()
        }
        most = max(lost, key=lost.__getitem__, default="")
        row = {"arm": one.title, "n": str(len(one.measured))}
        row |= {f"cosine {name}": one.text(COSINE, name) for name in pairs}
        row |= {"sharpest pair": f"{pair} {one.text(COSINE, pair)}"} if not pairs else {}
        row |= {label: one.text(label) for label in SINGLE}
        rows.append({**row, "most often lost": most if lost.get(most) else "none"})
    return pl.DataFrame(rows)


def _tasks(found: Sequence[Group]) -> pl.DataFrame:
    rows = [
        {"arm": one.title, "task": task}
        | {label: one.text(label, task) for label in (*OF_TASKS, LOST)}
        for one in found
        for task in one.tasks
    ]
    return pl.DataFrame(rows)


def about_lengths(study: Study) -> list[str]:
    """Return a caution if updates are over 1.25 times as long as the control's, or as short."""
    shown = sharpest(groups(study))
    lengths = {(one.name, *one.tasks): one.length for one in shown if one.is_control}
    ratios = []
    for one in shown:
        ratio = one.length / lengths.get((one.name, *one.tasks), one.length)
        if not one.is_control and not 1 / LONGER <= ratio <= LONGER:
            ratios.append(f"{ratio:.2g} ({one.arm})")
    if not ratios:
        return []
    return [
        f"Relative to the mean gradient, updates are {listed(ratios)} times as long as the "
        "control's, which acts like another learning rate: control=norm_matched compares "
        "directions alone, or a learning rate of its own for what weighs losses."
    ]


def conflict_charts(study: Study, facet: bool = False) -> dict[str, Any]:  # Any: kinds of charts
    """Return the cosines of pairs, weights and decreases of tasks over the steps, by a file's name.

    The arm is chosen in the chart; with `facet`, for a file, each arm has a panel.
    """
    shown = sharpest(groups(study))[:MAX_ARMS]
    if not shown:
        return {}
    names = [f"{one.arm}, n = {len(one.measured)}" for one in shown]
    known = [(one.arm, one.name, name) for one, name in zip(shown, names, strict=True)]
    arms = pl.DataFrame(known, schema=["arm", "group", "panel"], orient="row")
    steps = _steps(study).join(arms, on=["arm", "group"], how="semi", maintain_order="left")
    rows = _means(steps, "end").join(arms, on=["arm", "group"])
    charts: dict[str, Any] = {"conflicts": _cosines(rows.filter(number=COSINE), shown)}
    for number in ("weight", "decrease"):
        charts[f"conflict-{number}"] = _lines(rows.filter(number=number), shown, number)
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


def _cosines(rows: pl.DataFrame, shown: Sequence[Group]) -> alt.Chart:
    pairs = list(dict.fromkeys(pair for one in shown for pair in one.numbers[COSINE]))[:MAX_PAIRS]
    rows = rows.filter(pl.col("item").is_in(pairs)).select("panel", "item", "end", "value")
    reach = max(0.2, *rows["value"].abs())
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


def _lines(rows: pl.DataFrame, shown: Sequence[Group], number: str) -> Any:  # Any: a chart
    """A line for each task with its interval; of many tasks those that gain least and most."""
    tasks = [*shown[0].tasks]
    if len(tasks) > MAX_TASKS:
        tasks.sort(key=lambda task: shown[0].numbers.get("decrease", {}).get(task, 0.0))
        tasks = [*tasks[: MAX_TASKS // 2], *tasks[-MAX_TASKS // 2 :]]
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
