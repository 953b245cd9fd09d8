"""The angle between the gradient before and after a transform, at each site over the steps."""

from typing import Any

import altair as alt
import polars as pl

from gradsurg.report import charts
from gradsurg.report.study import Study


def chart(study: Study, transform: str) -> Any:  # Any: kinds of charts
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
