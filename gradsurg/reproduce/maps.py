"""The figure of an examination of maps: numbers layer by layer, and some of the maps themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure, SubFigure

from gradsurg.report.load import Arm, Found
from gradsurg.report.pictures import ARMS, INK
from gradsurg.report.wording import title
from gradsurg.training.run_directory import RunDirectory

SIDE = 0.82  # of a picture, in inches
MAX_IMAGES = 3
TRAINED = "trained"
Table = Mapping[str, Mapping[str, list[float]]]  # measure, layer, the value of each seed


def draw_maps(arms: Sequence[Arm], metric: str) -> Figure | None:
    """A panel for each measure with a line for each seed; below it maps of the first seed."""
    tables = [_table(arm.whole, metric) for arm in arms]
    kept = [_kept(arm.whole) for arm in arms]
    if not any(tables) or not all(kept):
        return None
    rows = len(arms) * min(MAX_IMAGES, *(len(told["images"]) for told in kept))
    height = SIDE * rows + 0.3
    figure = Figure(figsize=(7.2, 2.7 + height), layout="constrained")
    parts = figure.add_gridspec(2, 1, height_ratios=[2.7, height])
    names = [arm.name for arm in arms]
    _numbers(figure.add_subfigure(parts[0]), names, tables)
    if rows:
        _pictures(figure.add_subfigure(parts[1]), names, kept, rows)
    return figure


def _table(runs: Sequence[Found], metric: str) -> Table:
    """What stands under `<metric>/<measure>/<layer>`."""
    table: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for key, value in (run.summary or {}).items():
            parts = key.removeprefix(f"{metric}/").split("/")
            if key.startswith(f"{metric}/") and len(parts) == 2 and isinstance(value, int | float):
                table.setdefault(parts[0], {}).setdefault(parts[1], []).append(value)
    return table


def _kept(runs: Sequence[Found]) -> dict[str, Any]:  # Any: what JSON can hold
    first = min(runs, key=lambda run: run.seed)
    return RunDirectory(first.path).read_examined() or {}


def _numbers(figure: SubFigure, names: Sequence[str], tables: Sequence[Table]) -> None:
    measures = list(dict.fromkeys(measure for table in tables for measure in table))
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for measure, panel in zip(measures, panels, strict=True):
        for place, (name, table) in enumerate(zip(names, tables, strict=True)):
            layers = table.get(measure, {})
            for seed, values in enumerate(zip(*layers.values(), strict=True)):
                label = name if measure == measures[0] and not seed else ""
                style = {"color": ARMS[place % len(ARMS)], "linewidth": 1.1, "markersize": 3}
                panel.plot([TRAINED, *layers], [1.0, *values], "o-", label=label, **style)
        panel.set_title(title(measure))
        panel.axhline(0, color="#999999", linewidth=0.6)
        panel.tick_params(axis="x", labelrotation=35, labelsize=7)
    figure.supxlabel("drawn anew, from the top down to this layer", fontsize=8)
    figure.legend(loc="outside upper right", ncols=len(names), fontsize=8)


def _pictures(
    figure: SubFigure, names: Sequence[str], kept: Sequence[Mapping[str, Any]], rows: int
) -> None:
    """A row for each image and arm: the image, then the maps, blue up and red down."""
    layers = list(kept[0]["maps"])
    panels = figure.subplots(rows, 1 + len(layers), squeeze=False)
    for row, own in enumerate(panels):
        image, place = divmod(row, len(names))
        told = kept[place]
        if place == 0:
            own[0].imshow(told["images"][image], cmap="gray")
        own[0].set_ylabel(names[place], fontsize=8, color=ARMS[place % len(ARMS)])
        for panel, layer in zip(own[1:], layers, strict=True):
            panel.imshow(told["maps"][layer][image], cmap="RdBu", vmin=-1, vmax=1)
        for panel in own:
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set_visible(False)
    for panel, name in zip(panels[0], ["image", *layers], strict=True):
        panel.set_title(name, fontsize=7, color=INK, loc="center")
