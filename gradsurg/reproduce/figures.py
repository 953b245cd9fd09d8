"""The figures of a claim: all its arms in one chart, or the maps of an examination."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from gradsurg.experiment.run_directory import EXAMINED
from gradsurg.experiment.run_reader import known
from gradsurg.report import charts
from gradsurg.report.arms import Arm
from gradsurg.report.fronts import front_chart, fronts
from gradsurg.report.paper import save
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judge import outcome, terms

NAME = "figure"
SIDE = 64  # of a picture, in pixels
LINE = 2  # arms named in a line below a panel
MAX_IMAGES = 3
TRAINED, IMAGE = "trained", "image"
Chart = Any  # Any: kinds of charts, of which Altair has no common type


def draw(drawing: Drawing, study: Study, folder: Path) -> Path | None:
    """Write the figure of a study into `folder`; return its PNG, None if no run has the numbers."""
    drawings = {"curves": _curves, "outcomes": _outcomes, "alignment": _alignment}
    drawings |= {"front": _front, "maps": _maps}
    chart = drawings[drawing.kind](study, drawing.metric)
    if chart is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    spec = chart.configure(**charts.CONFIG).to_dict(validate=False)
    save(spec, folder / NAME)
    return folder / f"{NAME}.png"


def _curves(study: Study, metric: str) -> Chart | None:
    """The report's learning curves of one metric."""
    if metric not in study.metrics.columns:
        return None
    rows = study.metrics.select(*charts.LOG_KEYS, metric).drop_nulls(metric)
    if not charts.has_curves(rows):
        return None
    return charts.curves_chart(rows, [arm.name for arm in study.arms if arm.is_control])


def _outcomes(study: Study, metric: str) -> Chart | None:
    """A row for each arm, with a dot for each seed and a tick at their mean."""
    pairs = [(arm.name, outcome(study, run, metric)) for arm in study.arms for run in arm.whole]
    rows = pl.DataFrame(pairs, {"arm": pl.String, "value": pl.Float64}, orient="row").drop_nulls()
    if rows.is_empty():
        return None
    arm = alt.Y("arm:N", sort=[arm.name for arm in study.arms], title=None)
    title = f"{charts.label_of(metric, 'share')} of each seed, and the mean"
    value = alt.X("value:Q", title=title, scale=alt.Scale(zero=False))
    means = rows.group_by("arm", maintain_order=True).mean()
    chart = alt.layer(
        alt.Chart(charts.inline(rows)).mark_point(filled=True, opacity=0.6).encode(value, arm),
        alt.Chart(charts.inline(means)).mark_tick(thickness=2, size=18).encode(value, arm),
    )
    return chart.properties(width=320, height=alt.Step(charts.ROW))


def _front(study: Study, metric: str) -> Chart | None:
    """The report's trade-off of two losses, a panel for each task with its arms named above."""
    panels = []
    for front in fronts(study):
        begins = f"test/{front.metric}_"
        pair = [name.removeprefix(begins) for name in terms(metric) if name.startswith(begins)]
        if {*pair} <= {*front.names} and len(pair) == len(terms(metric)):
            arms = front.arms.select(pl.format("{} {}", "number", "arm"))
            lines = [", ".join(part.to_series()) for part in arms.iter_slices(LINE)]
            title = alt.Title(front.title, subtitle=lines)
            panel = front_chart(front, *pair)
            panels.append(panel.properties(width=300, height=300, title=title))
    return alt.concat(*panels, columns=1) if panels else None


def _alignment(study: Study, transform: str) -> Chart | None:
    """A panel for each arm with the transform: its angle at each site, a line for each seed."""
    texts = pl.col("run", "arm", "transform", "site").cast(pl.String)
    rows = study.effects.with_columns(texts).filter(pl.col("transform") == transform)
    rows = rows.filter(pl.col("norm_before") > 0).drop_nulls("cosine")
    rows = rows.select(
        "arm", "site", "seed", "step", angle=pl.col("cosine").clip(-1, 1).arccos().degrees()
    )
    treated = [arm.name for arm in study.arms if arm.whole and not arm.is_control]
    panels = []
    for name in treated:
        of_arm = rows.filter(arm=name)
        if len(of_arm):
            lines = alt.Chart(charts.inline(of_arm)).mark_line(strokeWidth=1.4)
            lines = lines.encode(
                alt.X("step:Q", scale=alt.Scale(type="log", nice=False)),
                alt.Y("angle:Q", title="degrees between before and after"),
                alt.Color("site:N", title=None, sort=None),
                detail="seed:N",
            )
            right = alt.Chart(alt.sequence(1)).mark_rule(strokeDash=[4, 3], color=charts.UNCLEAR)
            layers = alt.layer(lines, right.encode(y=alt.datum(90)))
            panels.append(layers.properties(title=name, width=250, height=170))
    return alt.concat(*panels).resolve_scale(color="independent") if panels else None


def _maps(study: Study, metric: str) -> Chart | None:
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


def _grid(pictures: Sequence[dict[str, Any]]) -> Chart:
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
