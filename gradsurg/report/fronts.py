"""The trade-off between tasks: arms by their means in each task, and trajectories over losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from json import dumps
from math import ceil
from typing import Any

import altair as alt
import polars as pl

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.experiment.run_directory import LANDSCAPE
from gradsurg.experiment.run_reader import BrokenFile, read
from gradsurg.report.arms import SPLIT, group
from gradsurg.report.charts import CONFIG, CONTROL, INK, PAPER, TREATED, choice, finished, inline
from gradsurg.report.load import LoadedRun, canonical
from gradsurg.report.page import Section, frame_table
from gradsurg.report.study import Study
from gradsurg.report.wording import is_share, listed
from gradsurg.stats import t_critical

MAX_PAIRS, MAX_ARMS, MAX_DRAWN = 6, 12, 60  # arms with trajectories, of a trade-off
WIDE = 10  # an axis that goes from 1 to 10 or further is by logarithms
LEAST = 1e-3  # of what the arms span: runs that end in one place differ by less
NARROW = 2e-3  # of its values, the least that an axis spans
SIGNS = {metric.name: 1 if metric.better == "lower" else -1 for metric in TASK_METRICS}
"""The metrics that are better lower (1) or higher (-1); of others this is not known."""
X1, X2 = "test/x1", "test/x2"
MAX_PLACES, MAX_CELLS, LEVELS = 100, 51, 15  # cells along an axis
PARETO, END = "#cc79a7", "#e69f00"
LAST = 1 << 60  # the place of the end, after all steps
Json = Any  # Any: what JSON can hold
MEAN = "mean of the losses"
HOW_WAYS = (
    "Trajectories of an arm from all starts over a loss, by rank among all places, dark is "
    "low; the thick line is the Pareto set."
)
HOW = (
    "Each arm in two tasks: its runs, and their mean with its 95 % t interval. Filled: no arm is "
    "better in one task and no worse in the others; the numbers of the arms are those of the table."
)


@dataclass(frozen=True)
class Front:
    """A metric of every task, and the arms that were trained on these tasks.

    `arms` has for each arm its number, name, number of runs, the arms that dominate it, and for
    each task the mean and half of its 95 % t interval; `runs` the values themselves. An arm is
    dominated by those whose means are no worse in any task and in one better, by more than a
    thousandth of the range of the arms.
    """

    task: str
    metric: str
    names: list[str]
    arms: pl.DataFrame
    runs: pl.DataFrame

    @property
    def title(self) -> str:
        more = len(self.names) * (len(self.names) - 1) // 2
        of = f", the first {MAX_PAIRS} of {more} pairs" * (more > MAX_PAIRS)
        return f"{self.task}: test {self.metric} of each task{of}"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The tasks, two by two; of many the first."""
        return list(combinations(self.names, 2))[:MAX_PAIRS]


def fronts(study: Study) -> list[Front]:
    """Return one for each task of several losses that two arms have, and for each metric."""
    controls = [arm.name for arm in study.arms if arm.is_control]
    runs = study.runs.filter(state="finished")
    tasks = [_task(study.by_name[name]) for name in runs["run"]]
    titles = [str(task.get("name") or task.get("_target_") or "") for task in tasks]
    runs = runs.with_columns(control=pl.col("arm").is_in(controls), title=pl.Series(titles))
    by_task = runs.group_by(pl.Series(map(canonical, tasks)), maintain_order=True)
    return [one for _, rows in by_task for metric in SIGNS for one in _front(rows, metric)]


def _front(runs: pl.DataFrame, metric: str) -> list[Front]:
    """The front of a metric in runs of one task; none if it has several losses, or arms."""
    begins = f"test/{metric}_"
    keys = [key for key in runs.columns if key.startswith(begins) and runs[key].count()]
    names = [key.removeprefix(begins) for key in keys]
    runs = runs.drop_nulls(keys).rename(dict(zip(keys, names, strict=True)))
    if len(names) < 2 or runs["arm"].n_unique() < 2:
        return []
    runs = runs.select("arm", "control", "seed", "title", *names)
    return [Front(runs["title"][0], metric, names, _ranked(runs, names, metric), runs)]


def _task(run: LoadedRun) -> dict[str, Any]:  # Any: YAML's values
    """The fields of the task without its start and its split."""
    task = (run.config or {}).get("task")
    items = task.items() if isinstance(task, Mapping) else ()
    return {key: item for key, item in items if key not in ("start", SPLIT)}


def _ranked(runs: pl.DataFrame, names: Sequence[str], metric: str) -> pl.DataFrame:
    """The means of the arms with their intervals, and the arms that dominate each."""
    reach = {n: t_critical(n) / n**0.5 for n in range(3, len(runs) + 1)}
    half = pl.len().replace_strict(reach, default=None, return_dtype=pl.Float64)
    ends = [(pl.col(name).std() * half).alias(f"{name} ±") for name in names]
    arms = runs.group_by("arm", "control", maintain_order=True)
    arms = arms.agg(pl.len().alias("n"), pl.col(names).mean(), *ends).with_row_index("number", 1)
    costs = arms.select("arm", pl.col(names) * SIGNS[metric])
    gaps = costs.select((pl.col(name).max() - pl.col(name).min()) * LEAST for name in names)
    more = {name: pl.col(name) - pl.col(f"{name}_right") for name in names}
    no_worse = pl.all_horizontal(one >= 0 for one in more.values())
    better = pl.any_horizontal(one > gaps[name].item() for name, one in more.items())
    by = costs.join(costs, how="cross").filter(no_worse & better)
    by = by.group_by("arm").agg(pl.col("arm_right").alias("dominated by"))
    return arms.join(by, on="arm", how="left", maintain_order="left").with_columns(
        pl.col("dominated by").fill_null([])
    )


def front_chart(front: Front, first: str, second: str) -> Any:  # Any: kinds of charts
    """Two tasks: each run, and each arm's mean with its intervals."""
    names = {"x": first, "y": second}
    shown = front.arms.head(MAX_DRAWN)
    best, ends = pl.col("dominated by").list.len() == 0, {"low": -1, "high": 1}
    arms = shown.select(
        "number",
        "arm",
        "control",
        best.alias("best"),
        **names,
        **{
            f"{axis}_{end}": pl.col(name) + sign * pl.col(f"{name} ±")
            for axis, name in names.items()
            for end, sign in ends.items()
        },
    )
    x, y = (_axis(front, axis, name) for axis, name in names.items())
    color = alt.condition("datum.control", alt.value(CONTROL), alt.value(TREATED))
    runs = front.runs.join(shown, on="arm", how="semi", maintain_order="left")
    points = alt.Chart(inline(runs.select("control", **names))).encode(x, y, color=color)
    means = alt.Chart(inline(arms)).encode(x, y, color=color, tooltip=["arm:N", "x:Q", "y:Q"])
    chart = alt.layer(
        points.mark_circle(size=16, opacity=0.4),
        means.mark_rule(clip=True).encode(alt.X("x_low:Q"), alt.X2("x_high")),
        means.mark_rule(clip=True).encode(alt.Y("y_low:Q"), alt.Y2("y_high")),
        means.mark_point(size=70, opacity=1, fill=PAPER, strokeWidth=2),
        means.transform_filter("datum.best").mark_circle(size=70, opacity=1),
        means.mark_text(align="left", dx=7, dy=-7).encode(text="number:N", color=alt.value(INK)),
    )
    better = "lower left" if SIGNS[front.metric] > 0 else "upper right"
    return chart.properties(title=f"{better} is better")


def front_figure(front: Front) -> Any:  # Any: kinds of charts
    """A panel for each two tasks, at most six, for a file; arms are named below."""
    panels = [front_chart(front, *p).properties(width=250, height=220) for p in front.pairs]
    arms = front.arms.head(MAX_DRAWN).select(pl.format("{} {}", "number", "arm"))
    lines = [", ".join(part.to_series()) for part in arms.iter_slices(4)]
    title = alt.Title(front.title, subtitle=[HOW, *lines])
    return alt.concat(*panels, columns=3, title=title).configure(**CONFIG)


def _axis(front: Front, axis: str, name: str) -> Any:  # Any: a channel of Altair
    """An axis with room for all runs, by logarithms where it is wide."""
    low, high = front.runs.select(low=pl.col(name).min(), high=pl.col(name).max()).row(0)
    by_log = 0 < WIDE * low <= high
    narrow = NARROW * max(abs(low), abs(high)) - (high - low)
    if narrow > 0:  # marks are rounded, and would lie far outside
        low, high = low - narrow / 2, high + narrow / 2
    kind = "log" if by_log else "linear"
    scale = alt.Scale(type=kind, domain=[low, high], padding=14, nice=False, zero=False)
    form = alt.Axis(format=".2~%" if is_share(front.metric) else ".3~g", tickCount=5)
    label = f"{front.metric} {name}{' (log scale)' * by_log}"
    channel = alt.X if axis == "x" else alt.Y
    return channel(f"{axis}:Q", title=label, scale=scale, axis=form)


def front_table(front: Front) -> pl.DataFrame:
    """The means of the arms in every task, half of their intervals, and what dominates them."""
    by = [listed(arms) if arms else "none" for arms in front.arms["dominated by"].to_list()]
    table = front.arms.drop("control", "dominated by")
    return table.with_columns(pl.Series("dominated by", by))


@dataclass(frozen=True)
class Landscape:
    """The losses of a task on a grid, and the trajectories of each arm from all starts.

    `grid` has a row for each loss and cell, with its rank among the cells in 15 levels, which shows
    valleys and plateaus alike; `points` those of each arm and `way`, in their order; `pareto` those
    of the Pareto set.
    """

    grid: pl.DataFrame
    points: pl.DataFrame
    pareto: pl.DataFrame


def landscapes(study: Study) -> list[Landscape]:
    """Return one for each task that has one; a file that cannot be read is a fault of the study.

    Runs that differ in where they start, or in their seed, are of one arm.
    """
    contents: dict[str, Json] = {}
    starts: dict[str, dict[str, list[float]]] = {}
    found = []
    for run in (run for run in study.all_runs if run.is_readable):
        try:
            content = read(run.path / LANDSCAPE)
        except BrokenFile as error:
            fault = f"{run.name}: {error}"
            study.faults.extend([fault] * (fault not in study.faults))
            continue
        if content is not None:
            start = content.pop("start")
            contents.setdefault(key := canonical(content), content)
            starts.setdefault(key, {})[run.name] = start
    for key, content in contents.items():
        around = [*content["pareto"], *content["pareto"][: bool(content.get("closed"))]]
        pareto = pl.DataFrame(around, {"x1": pl.Float64, "x2": pl.Float64}, orient="row")
        found.append(Landscape(_grid(content), _points(study, starts[key]), pareto))
    return [one for one in found if len(one.grid)]


def _grid(content: Json) -> pl.DataFrame:
    """The rank of each loss, and of their mean, in cells that are not too many."""
    losses = {f"loss {name}": table for name, table in content["values"].items()}
    schema = {"x2": pl.Float64, **dict.fromkeys(losses, pl.List(pl.Float64))}
    grid = pl.DataFrame({"x2": content["x2"], **losses}, schema, strict=False)
    grid = grid.gather_every(ceil(len(grid) / MAX_CELLS)).with_columns(x1=pl.lit(content["x1"]))
    every = ceil(len(content["x1"]) / MAX_CELLS)
    grid = grid.with_columns(pl.col("x1", *losses).list.gather_every(every)).explode("x1", *losses)
    grid = grid.with_columns(pl.mean_horizontal(*losses, ignore_nulls=False).alias(MEAN))
    grid = grid.unpivot(index=["x1", "x2"], variable_name="loss", value_name="level")
    grid = grid.filter(pl.col("level").is_finite())
    rank = (pl.col("level").rank("dense") - 1) * LEVELS // pl.col("level").n_unique()
    return grid.with_columns(rank.over("loss").cast(pl.Int64))


def _points(study: Study, starts: Mapping[str, list[float]]) -> pl.DataFrame:
    """The start, the logged points and the end of each run, the first arms alone."""
    chosen = [run for run in study.all_runs if run.name in starts]
    alike = [replace(run, config={**(run.config or {}), "task": _task(run)}) for run in chosen]
    arms = group(alike)[:MAX_ARMS]
    ways = [(run.name, arm.name, way) for arm in arms for way, run in enumerate(arm.runs)]
    rows = [(name, -1, *start) for name, start in starts.items()]
    rows += [(run.name, LAST, run.number(X1), run.number(X2)) for run in chosen]
    schema = {"run": pl.String, "step": pl.Int64, X1: pl.Float64, X2: pl.Float64}
    points = pl.DataFrame(rows, schema, orient="row")
    if {X1, X2} <= {*study.metrics.columns}:
        logged = study.metrics.select(*schema).with_columns(pl.col("run").cast(pl.String))
        points = pl.concat([points, logged.unique(["run", "step"])])
    points = points.filter(pl.all_horizontal(pl.col(X1, X2).is_finite())).sort("step")
    ends = pl.DataFrame(ways, schema=["run", "arm", "way"], orient="row")
    points = ends.join(points, on="run", maintain_order="left_right")
    place, last = pl.int_range(pl.len()).over("run"), (pl.len() - 1).over("run")
    thin = (place % (last / (MAX_PLACES - 1)).ceil() == 0) | (place == last)
    at = pl.when(place == last).then(pl.lit("end")).when(place == 0).then(pl.lit("start"))
    return points.with_columns(at=at).filter(thin).select("arm", "way", "at", x1=X1, x2=X2)


def landscape_chart(landscape: Landscape, facet: bool = False) -> Any:  # Any: kinds of charts
    """The trajectories of an arm over a loss, both chosen in the chart.

    With `facet`, for a file, each loss has a panel, and each arm one over the mean of the losses.
    """
    losses = landscape.grid["loss"].unique(maintain_order=True).to_list()
    arms = landscape.points["arm"].unique(maintain_order=True).to_list()
    if not facet:
        chosen = choice("loss", "Contours of", losses[::-1]), choice("arm", "Arm", arms)
        return finished(_over(landscape, "loss", "arm").add_params(*chosen), HOW_WAYS, 380)
    panels = [_over(landscape, dumps(loss), "0").properties(title=loss) for loss in losses]
    panels += [_over(landscape, dumps(MEAN), dumps(arm)).properties(title=arm) for arm in arms]
    sized = [panel.properties(width=200, height=200) for panel in panels]
    return alt.concat(*sized, columns=4).configure(**CONFIG)


def _over(landscape: Landscape, loss: str, arm: str) -> Any:  # Any: kinds of charts
    """A loss with the trajectories of an arm; both are expressions."""
    channels: list[Any] = []  # Any: Altair has no type for the channels of both axes
    widths: dict[str, Any] = {}
    for channel, name in ((alt.X, "x1"), (alt.Y, "x2")):
        places = landscape.grid[name].unique().sort().to_list()
        first, last = places[0], places[-1]
        scale = alt.Scale(domain=[first, last], nice=False)
        channels.append(channel(f"{name}:Q", title=name, scale=scale, axis=alt.Axis(grid=False)))
        widths[f"{name}_end"] = f"datum.{name} + {(last - first) / max(1, len(places) - 1)}"
    ground = alt.Chart(inline(landscape.grid, by=["loss", "x2"]))
    ground = ground.transform_filter(f"datum.loss == {loss}").transform_flatten(["x1", "level"])
    level: dict[str, Any] = {"scale": alt.Scale(scheme="cividis"), "legend": None}
    cells = ground.transform_calculate(**widths).mark_rect(clip=True, strokeWidth=0.7)
    cells = cells.encode(*channels, alt.Color("level:Q", **level), alt.Stroke("level:Q", **level))
    pareto = alt.Chart(inline(landscape.pareto.with_row_index("place")))
    pareto = pareto.mark_line(clip=True, color=PARETO, strokeWidth=4)
    ways = alt.Chart(inline(landscape.points, by=["arm", "way"]))
    ways = ways.transform_filter(f"datum.arm == {arm}").transform_flatten(["x1", "x2", "at"])
    lines = ways.transform_window(place="row_number()").encode(detail="way:N")
    lines = lines.mark_line(clip=True, color=PAPER, strokeWidth=1.6)
    shapes = alt.Scale(domain=["start", "end"], range=["circle", "cross"])
    marks = ways.transform_filter("isValid(datum.at)")
    marks = marks.mark_point(filled=True, size=60, opacity=1, color=END, stroke=INK)
    return alt.layer(
        cells.encode(alt.X2("x1_end"), alt.Y2("x2_end")),
        pareto.encode(*channels, order="place:O"),
        lines.encode(*channels, order="place:O"),
        marks.encode(*channels, alt.Shape("at:N", scale=shapes, title=None)),
    )


def sections(study: Study) -> list[Section]:
    """Return the sections of the page on trade-offs and on trajectories."""
    found = fronts(study)
    charts = [
        finished(front_chart(front, *pair), f"{front.metric} of {' and '.join(pair)} by arm", 300)
        for front in found
        for pair in front.pairs
    ]
    tables = [frame_table(front.title, front_table(front), is_open=True) for front in found]
    more = max((len(front.arms) for front in found), default=0)
    notes = [f"The first {MAX_DRAWN} of {more} arms are drawn."] * (more > MAX_DRAWN)
    fields = ("fronts", "Trade-off between the tasks", HOW, charts, tables, notes)
    parts = [Section(*fields)] if found else []
    ways = [landscape_chart(landscape) for landscape in landscapes(study)]
    return [*parts, *([Section("trajectories", "Trajectories", HOW_WAYS, ways)] if ways else [])]
