"""How each measure of two maps falls as layers are drawn anew, and the maps of one seed."""

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from gradsurg.experiment.run_directory import EXAMINED
from gradsurg.experiment.run_reader import known
from gradsurg.report.arms import Arm
from gradsurg.report.study import Study

SIDE = 64  # of a picture, in pixels
MAX_IMAGES = 3
TRAINED, IMAGE = "trained", "image"


def chart(study: Study, metric: str) -> Any:  # Any: kinds of charts
    """A panel for each measure with a line for each seed, and maps of the first seed below."""
    arms = [arm for arm in study.arms if arm.whole]
    rows = [row for arm in arms for row in _numbers(arm, metric)]
    pictures = [cell for arm in arms for cell in _pictures(arm)]
    if not rows or {cell["arm"] for cell in pictures} != {arm.name for arm in arms}:
        return None
    measures, layers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("of", "layer"))
    lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True, strokeWidth=1.1)
    lines = lines.encode(
        alt.X("layer:N", sort=layers, title="drawn anew, down to this layer"),
        alt.Y("value:Q", title=None),
        alt.Color("arm:N", sort=None, title=None),
        detail="seed:N",
    )
    lines = lines.properties(width=190, height=150)
    numbers = lines.facet(column=alt.Column("of:N", sort=measures, title=None))
    return alt.vconcat(numbers, _grid(pictures)).resolve_scale(color="independent")


def _numbers(arm: Arm, metric: str) -> Iterator[dict[str, Any]]:
    """Yield the numbers called `<metric>/<measure>/<layer>`, before them 1 for the whole model."""
    for run in arm.whole:
        names = [key.split("/") for key in run.summary or {} if key.startswith(f"{metric}/")]
        names = [parts[-2:] for parts in names if len(parts) == metric.count("/") + 3]
        for measure in dict.fromkeys(measure for measure, _ in names):
            own = {"arm": arm.name, "seed": run.seed, "of": measure}
            yield {**own, "layer": TRAINED, "value": 1.0}
            for layer in (layer for of, layer in names if of == measure):
                value = run.number(f"{metric}/{measure}/{layer}")
                yield {**own, "layer": layer, "value": value}


def _pictures(arm: Arm) -> Iterator[dict[str, Any]]:
    """Yield the pixels of the images that the first seed's examination saved, and of their maps."""
    saved = known(arm.whole[0].path / EXAMINED)
    for number in range(min(MAX_IMAGES, len(saved.get("images", ())))):
        panels = {IMAGE: saved["images"][number]}
        panels |= {layer: maps[number] for layer, maps in saved["maps"].items()}
        for panel, picture in panels.items():
            for y, line in enumerate(picture):
                for x, value in enumerate(line):
                    place = {"arm": arm.name, "row": f"{number + 1}, {arm.name}", "panel": panel}
                    yield {**place, "x": x, "y": y, "value": value}


def _grid(pictures: Sequence[dict[str, Any]]) -> Any:
    """A row for each image and arm: the image, then its maps, blue positive, red negative."""
    panels = list(dict.fromkeys(cell["panel"] for cell in pictures))
    rows = sorted({cell["row"]: None for cell in pictures}, key=lambda row: row.partition(",")[0])
    base = alt.Chart().mark_rect(stroke=None)
    base = base.encode(alt.X("x:O", axis=None), alt.Y("y:O", axis=None))
    grey = alt.Color("value:Q", scale=alt.Scale(scheme="greys", reverse=True), legend=None)
    signed = alt.Scale(scheme="redblue", domain=[-1, 1])
    parts = alt.layer(
        base.transform_filter(f"datum.panel == '{IMAGE}'").encode(grey),
        base.transform_filter(f"datum.panel != '{IMAGE}'").encode(
            alt.Color("value:Q", scale=signed, legend=None)
        ),
        data=alt.Data(values=list(pictures)),
    )
    parts = parts.resolve_scale(color="independent").properties(width=SIDE, height=SIDE)
    row = alt.Row("row:N", sort=rows, title=None)
    return parts.facet(row=row, column=alt.Column("panel:N", sort=panels, title=None), spacing=4)
