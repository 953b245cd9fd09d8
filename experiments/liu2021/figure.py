"""The trajectories of the runs of each arm over the mean of the losses."""

from collections.abc import Callable
from typing import Any

import altair as alt
import polars as pl
import torch
from gradsurg.experiments.liu2021.task import CAGradToy
from torch import Tensor

from gradsurg.report import charts
from gradsurg.report.study import Study

CELLS = 51  # along each axis
Chart = Any  # Any: kinds of charts, of which Altair has no common type


def chart(study: Study, point: str) -> Chart | None:
    return trajectories(study, point, lambda points: sum(CAGradToy().values(points)), 10)


def trajectories(
    study: Study, point: str, loss: Callable[[Tensor], Any], reach: float
) -> Chart | None:
    """A panel for each label: its runs' points over the ranks of `loss`, light is high.

    `point` is the beginning of the names of the coordinates, `reach` the end of both axes.
    """
    axes = [f"{point}1", f"{point}2"]
    if not {*axes} <= {*study.metrics.columns}:
        return None
    ticks = torch.linspace(-reach, reach, CELLS, dtype=torch.float64)
    places = torch.cartesian_prod(ticks, ticks)
    ground = pl.DataFrame(places.numpy(), ["x1", "x2"], orient="row")
    ground = ground.with_columns(level=pl.Series(loss(places).numpy()).rank("dense"))
    labels = {run.name: run.label for run in study.all_runs}
    points = study.metrics.select(
        "step",
        pl.col("run").cast(pl.String),
        label=pl.col("run").cast(pl.String).replace(labels),
        x1=axes[0],
        x2=axes[1],
    ).drop_nulls()
    x, y = (
        channel(f"{name}:Q", scale=alt.Scale(domain=[-reach, reach], nice=False))
        for channel, name in ((alt.X, "x1"), (alt.Y, "x2"))
    )
    shade = alt.Color("level:Q", scale=alt.Scale(scheme="cividis"), legend=None)
    cells = alt.Chart(charts.inline(ground)).mark_square(size=25, opacity=1, clip=True)
    panels = []
    for (label,), rows in points.group_by("label", maintain_order=True):
        lines = alt.Chart(charts.inline(rows)).mark_line(clip=True, color=charts.PAPER)
        lines = lines.encode(x, y, detail="run:N", order="step:Q")
        ends = alt.Chart(charts.inline(rows.group_by("run").last())).encode(x, y)
        marks = ends.mark_point(shape="cross", filled=True, size=60, color=charts.CONTROL)
        panel = alt.layer(cells.encode(x, y, shade), lines, marks)
        panels.append(panel.properties(title=label, width=200, height=200))
    return alt.concat(*panels, columns=4) if panels else None
