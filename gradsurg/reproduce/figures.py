"""The figures of a claim: all its arms in one chart, or the maps of an examination."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import acos, degrees
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gradsurg.report.charts import TASKS as COLOURS
from gradsurg.report.charts import UNCLEAR, Columns, Panel, Spec
from gradsurg.report.figures import Figure as Chart
from gradsurg.report.figures import write_figure
from gradsurg.report.load import Arm, LoadedRun, group
from gradsurg.report.wording import is_share, title
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judge import outcome, terms
from gradsurg.training.run_directory import EFFECTS, METRICS, RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

NAME = "figure"
ROW = 26  # height of an arm, in pixels
LABEL = 420  # longest name of an arm, in pixels
SIDE = 0.82  # of a picture, in inches
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
MAX_IMAGES = 3
TRAINED = "trained"
Table = Mapping[str, Mapping[str, list[float]]]  # measure, layer, the value of each seed


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
    return write_figure(chart, folder)


def _curves(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A line for each seed over the steps, in the colour of its arm."""
    data: Columns = {"arm": [], "seed": [], "step": [], "value": []}
    for arm in arms:
        for run in arm.whole:
            for row in RunDirectory(run.path).read_rows(METRICS):
                if row.get(metric) is not None:
                    _append(data, arm.name, run.seed, row["step"], row[metric])
    if not data["arm"]:
        return None
    names = [arm.name for arm in arms]
    view = {
        "data": {"name": "points"},
        "mark": {"type": "line", "strokeWidth": 1.4, "clip": True},
        "encoding": {
            "x": _quantity("step", "step"),
            "y": _quantity("value", title(metric), share=is_share(metric)),
            "color": _colour("arm", names),
            "detail": {"field": "seed"},
        },
    }
    return Chart(NAME, [Panel("", "", view, {"points": data}, width=480, height=270)], 1)


def _outcomes(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A row for each arm, with a dot for each seed and a tick at their mean."""
    seeds: Columns = {"arm": [], "value": []}
    means: Columns = {"arm": [], "value": []}
    for arm in arms:
        values = [value for run in arm.whole if (value := outcome(run, metric)) is not None]
        for value in values:
            _append(seeds, arm.name, value)
        if values:
            _append(means, arm.name, sum(values) / len(values))
    if not seeds["arm"]:
        return None
    names = [arm.name for arm in arms]
    shared = {
        "x": _quantity("value", f"{title(metric)} of each seed, and the mean", is_share(metric)),
        "y": {
            "field": "arm",
            "type": "nominal",
            "sort": names,
            "title": None,
            "axis": {"labelLimit": LABEL},
        },
        "color": {**_colour("arm", names), "legend": None},
    }
    dots = {"type": "point", "filled": True, "size": 45, "opacity": 0.6}
    tick = {"type": "tick", "thickness": 2, "size": 18}
    view = {
        "layer": [
            {"data": {"name": "seeds"}, "mark": dots, "encoding": shared},
            {"data": {"name": "means"}, "mark": tick, "encoding": shared},
        ]
    }
    height = ROW * len(arms)
    panel = Panel("", "", view, {"seeds": seeds, "means": means}, width=320, height=height)
    return Chart(NAME, [panel], 1)


def _front(arms: Sequence[Arm], metric: str) -> Chart | None:
    """A panel for each task: the mean of each arm in two losses, in the colour of its label."""
    first, second = terms(metric)
    labels = list(dict.fromkeys(arm.runs[0].label for arm in arms))
    tables: dict[str, Columns] = {}
    for arm in arms:
        pairs = [[outcome(run, name) for name in (first, second)] for run in arm.whole]
        known = [[x, y] for x, y in pairs if x is not None and y is not None]
        if known:
            task = [f"{key}={arm.config[key]}" for key in _differing(arms, "task.")]
            columns = tables.setdefault(", ".join(task), {"arm": [], "x": [], "y": []})
            x, y = (fmean(column) for column in zip(*known, strict=True))
            _append(columns, arm.runs[0].label, x, y)
    encoding: dict[str, Any] = {"color": _colour("arm", labels)}
    if len(labels) > len(COLOURS):  # the colours come again, with another shape
        encoding["color"]["legend"]["columns"] = 2
        shapes = [SHAPES[number // len(COLOURS) % len(SHAPES)] for number in range(len(labels))]
        scale = {"domain": labels, "range": shapes}
        encoding["shape"] = {**encoding["color"], "scale": scale}
    for axis, name in (("x", first), ("y", second)):
        encoding[axis] = {
            **_quantity(axis, f"{title(name)} (log scale)"),
            "axis": {"labelSeparation": 10},
            "scale": {"type": "log", "nice": False, "padding": 12},
        }
    ring = {"type": "point", "filled": False, "size": 90, "strokeWidth": 2}
    view = {"data": {"name": "means"}, "mark": ring, "encoding": encoding}
    panels = [
        Panel(task, "", view, {"means": columns}, width=300, height=300)
        for task, columns in tables.items()
    ]
    return Chart(NAME, panels, len(panels)) if panels else None


def _differing(arms: Sequence[Arm], start: str) -> list[str]:
    """Return the keys of the configs below `start` whose values differ."""
    keys = dict.fromkeys(key for arm in arms for key in arm.config if key.startswith(start))
    return [key for key in keys if len({str(arm.config.get(key)) for arm in arms}) > 1]


def _alignment(arms: Sequence[Arm], transform: str) -> Chart | None:
    """A panel for each arm with the transform: its angle at each site, a line for each seed."""
    panels = []
    for arm in arms:
        data: Columns = {"site": [], "seed": [], "step": [], "angle": []}
        for run in arm.whole if not arm.is_control else ():
            for site, step, angle in _angles(run, transform):
                _append(data, site, run.seed, step, angle)
        if data["site"]:
            panels.append(Panel(arm.name, "", _angle_view(data["site"]), {"angles": data}))
    return Chart(NAME, panels, len(panels)) if panels else None


def _angle_view(sites: Sequence[str]) -> Spec:
    return {
        "layer": [
            {
                "data": {"name": "angles"},
                "mark": {"type": "line", "strokeWidth": 1.4},
                "encoding": {
                    "x": {**_quantity("step", "step"), "scale": {"type": "log", "nice": False}},
                    "y": _quantity("angle", "degrees between before and after"),
                    "color": _colour("site", list(dict.fromkeys(sites))),
                    "detail": {"field": "seed"},
                },
            },
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": UNCLEAR},
                "encoding": {"y": {"datum": 90}},
            },
        ]
    }


def _angles(run: LoadedRun, transform: str) -> list[tuple[str, int, float]]:
    """Return (site, step, angle) for each measurement of a gradient that is not zero."""
    angles = []
    for row in RunDirectory(run.path).read_rows(EFFECTS):
        cosine = row.get("cosine")
        if row["transform"] == transform and cosine is not None and row["norm_before"]:
            angles.append((row["site"], row["step"], degrees(acos(max(-1.0, min(1.0, cosine))))))
    return angles


def _append(columns: Columns, *cells: object) -> None:
    for column, cell in zip(columns.values(), cells, strict=True):
        column.append(cell)


def _quantity(field: str, name: str, share: bool = False) -> Spec:
    axis = {"format": ".2~%"} if share else {}
    scale = {"zero": False}
    return {"field": field, "type": "quantitative", "title": name, "axis": axis, "scale": scale}


def _colour(field: str, names: Sequence[str]) -> Spec:
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(names))]
    legend = {"title": None, "orient": "bottom", "columns": 1, "labelLimit": 460}
    scale = {"domain": list(names), "range": colours}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


# Maps of an examination, with matplotlib ------------------------------------------------------


def _write_maps(arms: Sequence[Arm], metric: str, folder: Path) -> Path | None:
    if find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    from gradsurg.report.pictures import STYLE

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
    return RunDirectory(first.path).read_examined() or {}


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
