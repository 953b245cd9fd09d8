"""The figures of a claim: all its arms in one chart, or one by the paper's own `figure.py`."""

from importlib import import_module
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from gradsurg.report import charts
from gradsurg.report.paper import save
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import Drawing
from gradsurg.reproduce.judge import outcome

NAME = "figure"
Chart = Any  # Any: kinds of charts, of which Altair has no common type


def draw(drawing: Drawing, study: Study, folder: Path, paper: str = "") -> Path | None:
    """Write the figure of a study into `folder`; return its PNG, None if no run has the numbers."""
    if drawing.kind == "own":
        draw_own = import_module(f"gradsurg.experiments.{paper}.figure").chart
        chart = draw_own(study, drawing.metric)
    else:
        chart = (_curves if drawing.kind == "curves" else _outcomes)(study, drawing.metric)
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
