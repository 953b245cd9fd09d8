"""The figures of a claim: all its arms in one chart, or the maps of an examination."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import acos, degrees
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import altair as alt

from gradsurg.experiment.run_directory import EFFECTS, EXAMINED, METRICS, RunDirectory
from gradsurg.experiment.run_reader import known
from gradsurg.report.arms import Arm, group
from gradsurg.report.charts import CONFIG, INK, UNCLEAR
from gradsurg.report.charts import TASKS as COLOURS
from gradsurg.report.load import LoadedRun
from gradsurg.report.paper import save
from gradsurg.report.wording import is_share, title
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judge import outcome, terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

NAME = "figure"
ROW = 26  # height of an arm, in pixels
LABEL = 420  # longest name of an arm, in pixels
SIDE = 0.82  # of a picture, in inches
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
MAX_IMAGES = 3
TRAINED = "trained"
STYLE: dict[Any, Any] = {  # Any: matplotlib has a type for its keys, but no public name for it
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "legend.frameon": False,
}
Table = Mapping[str, Mapping[str, list[float]]]  # measure, layer, the value of each seed
Chart = alt.Chart | alt.LayerChart | alt.ConcatChart | alt.FacetChart


def draw(drawing: Drawing, runs: Sequence[LoadedRun], folder: Path) -> Path | None:
    """Write the figure of the arms of these runs into `folder`; return its PNG.

    None if no run has the numbers, or for maps if matplotlib is not installed.
    """
    arms = [arm for arm in group(runs) if arm.whole]
    if drawing.kind == "maps":
        return _write_maps(arms, drawing.metric, folder)
    charts = {"curves": _curves, "outcomes": _outcomes, "alignment": _alignment, "front": _front}
    chart = charts[drawing.kind](arms, drawing.metric)
    if chart is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    save(chart.configure(**CONFIG).to_dict(validate=False), folder / NAME)
    return folder / f"{NAME}.png"


def _curves(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A line for each seed over the steps, in the colour of its arm."""
    rows = [
        {"arm": arm.name, "seed": run.seed, "step": row["step"], "value": row[metric]}
        for arm in arms
        for run in arm.whole
        for row in RunDirectory(run.path).read_rows(METRICS)
        if row.get(metric) is not None
    ]
    if not rows:
        return None
    chart = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=1.4, clip=True)
    return chart.properties(width=480, height=270).encode(
        _quantity(alt.X, "step", "step"),
        _quantity(alt.Y, "value", title(metric), is_share(metric)),
        _colour("arm", [arm.name for arm in arms]),
        detail="seed:N",
    )


def _outcomes(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A row for each arm, with a dot for each seed and a tick at their mean."""
    rows = [
        {"arm": arm.name, "value": value}
        for arm in arms
        for run in arm.whole
        if (value := outcome(run, metric)) is not None
    ]
    if not rows:
        return None
    names = [arm.name for arm in arms]
    label = f"{title(metric)} of each seed, and the mean"
    base = alt.Chart(alt.Data(values=rows)).encode(
        alt.Y("arm:N", sort=names, title=None, axis=alt.Axis(labelLimit=LABEL)),
        _colour("arm", names, legend=None),
    )
    value = _quantity(alt.X, "value", label, is_share(metric))
    mean = base.transform_aggregate(value="mean(value)", groupby=["arm"])
    layers = alt.layer(
        base.mark_point(filled=True, size=45, opacity=0.6).encode(value),
        mean.mark_tick(thickness=2, size=18).encode(value),
    )
    return layers.properties(width=320, height=ROW * len(names))


def _front(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A panel for each task: the mean of each arm in two losses, in the colour of its label."""
    names = terms(metric)
    labels = list(dict.fromkeys(arm.runs[0].label for arm in arms))
    tasks: dict[str, list[dict[str, object]]] = {}
    for arm in arms:
        pairs = [[outcome(run, name) for name in names] for run in arm.whole]
        known = [[x, y] for x, y in pairs if x is not None and y is not None]
        if known:
            task = [f"{key}={arm.config[key]}" for key in _differing(arms, "task.")]
            x, y = (fmean(column) for column in zip(*known, strict=True))
            row = {"arm": arm.runs[0].label, "x": x, "y": y}
            tasks.setdefault(", ".join(task), []).append(row)
    several = len(labels) > len(COLOURS)  # the colours come again, with another shape
    looks: list[Any] = [_colour("arm", labels, columns=1 + several)]  # Any: channels of Altair
    if several:
        shapes = [SHAPES[number // len(COLOURS) % len(SHAPES)] for number in range(len(labels))]
        scale = alt.Scale(domain=labels, range=shapes)
        looks.append(alt.Shape("arm:N", scale=scale, legend=looks[0].legend))
    scale = alt.Scale(type="log", nice=False, padding=12)
    axes = [
        _quantity(channel, field, f"{title(name)} (log scale)").scale(scale)
        for channel, field, name in zip((alt.X, alt.Y), "xy", names, strict=True)
    ]
    panels = [
        alt.Chart(alt.Data(values=rows), title=task, width=300, height=300)
        .mark_point(size=90, strokeWidth=2)
        .encode(*axes, *looks)
        for task, rows in tasks.items()
    ]
    return alt.concat(*panels) if panels else None


def _differing(arms: Sequence[Arm], start: str) -> list[str]:
    """Return the keys of the configs below `start` whose values differ."""
    keys = dict.fromkeys(key for arm in arms for key in arm.config if key.startswith(start))
    return [key for key in keys if len({str(arm.config.get(key)) for arm in arms}) > 1]


def _alignment(arms: Sequence[Arm], transform: str) -> Chart | None:
    """A panel for each arm with the transform: its angle at each site, a line for each seed."""
    panels = []
    for arm in (arm for arm in arms if not arm.is_control):
        rows = [row for run in arm.whole for row in _angles(run, transform)]
        if rows:
            sites = list(dict.fromkeys(str(row["site"]) for row in rows))
            step = _quantity(alt.X, "step", "step").scale(alt.Scale(type="log", nice=False))
            angle = _quantity(alt.Y, "angle", "degrees between before and after")
            lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=1.4)
            lines = lines.encode(step, angle, _colour("site", sites), detail="seed:N")
            right = alt.Chart(alt.Data(values=[{}])).mark_rule(strokeDash=[4, 3], color=UNCLEAR)
            layers = alt.layer(lines, right.encode(y=alt.datum(90)))
            panels.append(layers.properties(title=arm.name, width=250, height=170))
    if not panels:
        return None
    return alt.concat(*panels).resolve_scale(color="independent")


def _angles(run: LoadedRun, transform: str) -> list[dict[str, object]]:
    """Return site, seed, step and angle of each measurement of a gradient that is not zero."""
    rows = []
    for row in RunDirectory(run.path).read_rows(EFFECTS):
        cosine = row.get("cosine")
        if row["transform"] == transform and cosine is not None and row["norm_before"]:
            angle = degrees(acos(max(-1.0, min(1.0, cosine))))
            rows.append(
                {"site": row["site"], "seed": run.seed, "step": row["step"], "angle": angle}
            )
    return rows


def _quantity(channel: Any, field: str, name: str, share: bool = False) -> Any:
    """A channel of Altair, which has no type for all of them."""
    axis = alt.Axis(format=".2~%") if share else alt.Axis()
    return channel(f"{field}:Q", title=name, axis=axis, scale=alt.Scale(zero=False))


def _colour(field: str, names: Sequence[str], columns: int = 1, **more: None) -> alt.Color:
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(names))]
    key = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=460)
    scale = alt.Scale(domain=list(names), range=colours)
    return alt.Color(f"{field}:N", scale=scale, **{"legend": key, **more})


# Maps of an examination, with matplotlib ------------------------------------------------------


def _write_maps(arms: Sequence[Arm], metric: str, folder: Path) -> Path | None:
    if find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = draw_maps(arms, metric)
        if figure is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{NAME}.png"
        figure.savefig(path, dpi=130)
    return path


def draw_maps(arms: Sequence[Arm], metric: str) -> "Figure | None":
    """Draw a panel for each measure with a line for each seed, and maps of the first seed below."""
    from matplotlib.figure import Figure

    tables = [_layer_table(arm.whole, metric) for arm in arms]
    saved = [_saved(arm.whole) for arm in arms]
    if not any(tables) or not all(saved):
        return None
    rows = len(arms) * min(MAX_IMAGES, *(len(content["images"]) for content in saved))
    height = SIDE * rows + 0.3
    figure = Figure(figsize=(7.2, 2.7 + height), layout="constrained")
    parts = figure.add_gridspec(2, 1, height_ratios=[2.7, height])
    names = [arm.name for arm in arms]
    _draw_numbers(figure.add_subfigure(parts[0]), names, tables)
    if rows:
        _draw_pictures(figure.add_subfigure(parts[1]), names, saved, rows)
    return figure


def _layer_table(runs: Sequence[LoadedRun], metric: str) -> Table:
    """Return the numbers called `<metric>/<measure>/<layer>`."""
    table: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for key, value in (run.summary or {}).items():
            parts = key.removeprefix(f"{metric}/").split("/")
            if key.startswith(f"{metric}/") and len(parts) == 2 and isinstance(value, int | float):
                table.setdefault(parts[0], {}).setdefault(parts[1], []).append(value)
    return table


def _saved(runs: Sequence[LoadedRun]) -> dict[str, Any]:  # Any: what JSON can hold
    first = min(runs, key=lambda run: run.seed)
    return known(first.path / EXAMINED)


def _draw_numbers(figure: "SubFigure", names: Sequence[str], tables: Sequence[Table]) -> None:
    measures = list(dict.fromkeys(measure for table in tables for measure in table))
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for measure, panel in zip(measures, panels, strict=True):
        for place, (name, table) in enumerate(zip(names, tables, strict=True)):
            layers = table.get(measure, {})
            for seed, values in enumerate(zip(*layers.values(), strict=True)):
                label = name if measure == measures[0] and not seed else ""
                style = {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.1, "markersize": 3}
                panel.plot([TRAINED, *layers], [1.0, *values], "o-", label=label, **style)
        panel.set_title(title(measure))
        panel.axhline(0, color="#999999", linewidth=0.6)
        panel.tick_params(axis="x", labelrotation=35, labelsize=7)
    figure.supxlabel("drawn anew, from the top down to this layer", fontsize=8)
    figure.legend(loc="outside upper right", ncols=len(names), fontsize=8)


def _draw_pictures(
    figure: "SubFigure", names: Sequence[str], saved: Sequence[Mapping[str, Any]], rows: int
) -> None:
    """Draw a row for each image and arm: the image, then its maps, blue positive, red negative."""
    layers = list(saved[0]["maps"])
    panels = figure.subplots(rows, 1 + len(layers), squeeze=False)
    for row, cells in enumerate(panels):
        image, place = divmod(row, len(names))
        content = saved[place]
        if place == 0:
            cells[0].imshow(content["images"][image], cmap="gray")
        cells[0].set_ylabel(names[place], fontsize=8, color=COLOURS[place % len(COLOURS)])
        for panel, layer in zip(cells[1:], layers, strict=True):
            panel.imshow(content["maps"][layer][image], cmap="RdBu", vmin=-1, vmax=1)
        for panel in cells:
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set_visible(False)
    for panel, name in zip(panels[0], ["image", *layers], strict=True):
        panel.set_title(name, fontsize=7, loc="center")
