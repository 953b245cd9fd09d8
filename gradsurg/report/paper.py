"""Figures and a LaTeX table of a study for a paper, in the widths of one and of two columns."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from gradsurg.report import charts
from gradsurg.report.cautions import cautions
from gradsurg.report.compare import arms_named, compare
from gradsurg.report.study import Study
from gradsurg.report.sweeps import doses
from gradsurg.report.tables import latex
from gradsurg.report.wording import title

WIDTHS = (3.3, 6.8)
"""Inches: one column, and both, of a page in two columns."""
STYLES = {
    "sans": "Arial, Liberation Sans, Helvetica, sans-serif",
    "serif": "Times New Roman, Liberation Serif, Times, serif",
}
POINTS, DPI, FONT, BAR, MAX_HEIGHT = 72, 300, 8, 110, 180
MAX_ARMS, MAX_DRAWN = 12, 60  # with curves or maps of effects, with differences


def write_paper(
    study: Study,
    folder: Path,
    metric: str = "",
    arms: Sequence[str] = (),
    style: str = "sans",
    spread: str = "interval",
) -> list[Path]:
    """Write each figure in both widths as PDF, SVG and PNG, and a table for each metric.

    Return the files. `arms` are names of arms, drawn with their controls; if empty, all arms are
    drawn. `spread` is passed to `tables.latex`. Raises LookupError for a metric or an arm that the
    study does not have.
    """
    frame, shown = compare(study), _of_arms(study, arms)
    frame = frame.filter(pl.col("arm").is_in([arm.name for arm in shown.arms]))
    metric = _metric(study, metric)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, chart in figures(shown, frame, metric).items():
        for width in WIDTHS:
            paths = save(_sized(chart, width, STYLES[style]), folder / f"{name}-{width}in", DPI)
            paths[1].write_text(_in_inches(paths[1].read_text("utf-8")), encoding="utf-8")
            files += paths
    for place, key in enumerate([metric] if metric else list(study.metrics_of) or [""]):
        name = "table" + f"-{re.sub('[^0-9A-Za-z]', '-', key)}" * (place > 0)
        files.append(folder / f"{name}.tex")
        files[-1].write_text(
            latex(shown, frame, key, spread, cautions(shown, frame)), encoding="utf-8"
        )
    return files


def save(spec: charts.Json, stem: Path, ppi: int = 108) -> list[Path]:
    """Write a chart's specification as PDF, SVG and PNG; return the files."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(spec)
    files = [stem.with_name(f"{stem.name}.{end}") for end in ("pdf", "svg", "png")]
    files[0].write_bytes(vl_convert.svg_to_pdf(svg))
    files[1].write_text(svg, encoding="utf-8")
    files[2].write_bytes(vl_convert.svg_to_png(svg, ppi=ppi))
    return files


def figures(study: Study, frame: pl.DataFrame, metric: str = "") -> dict[str, charts.Chart]:
    """The charts that have data, by the stem of their files; `metric` is the first by default."""
    key = metric or next(iter(study.metrics_of), "")
    known = frame.filter(pl.col("block").is_null(), metric=key).drop_nulls("difference")
    known = known.head(MAX_DRAWN)
    drawn = {"outcome": charts.outcome_chart(known)} if len(known) else {}
    controls = [arm.name for arm in study.arms if arm.is_control]
    treated = [arm.name for arm in study.arms if not arm.is_control]
    few = pl.col("arm").cast(pl.String).is_in([*treated[:MAX_ARMS], *controls[:MAX_ARMS]])
    if logged := charts.curve_metrics(study.metrics):
        curve = metric if metric in logged else logged[0]
        rows = study.metrics.filter(few).select(*charts.LOG_KEYS, curve).drop_nulls(curve)
        drawn["curves"] = charts.curves_chart(rows, controls)
    swept = doses(study, known).group_by("label", "key", maintain_order=True)
    drawn |= numbered("doses", [charts.dose_chart(rows) for _, rows in swept])
    acted = study.effects.filter(few, pl.col("transform").cast(pl.String) != "none")
    maps = charts.effect_frame(acted).partition_by("name") if len(acted) else []
    heading = "{}: cosine of before and after"
    effects = [charts.effect_map(x).properties(title=heading.format(x["name"][0])) for x in maps]
    return drawn | numbered("effects", effects)


def numbered(stem: str, items: Iterable[Any]) -> dict[str, Any]:  # Any: kinds of charts
    """Names for several figures of one kind: `effects`, `effects-2` and so on."""
    return {f"{stem}-{place}" if place > 1 else stem: one for place, one in enumerate(items, 1)}


def _metric(study: Study, name: str) -> str:
    """The key of a metric that is named by its key or its title; empty without a name."""
    keys = list(dict.fromkeys([*study.metrics_of, *charts.curve_metrics(study.metrics)]))
    for key in keys if name else [""]:
        if name in (key, title(key)):
            return key
    raise LookupError(f"no metric is named {name!r}; the metrics are: {', '.join(keys)}")


def _of_arms(study: Study, names: Sequence[str]) -> Study:
    """The study of some arms and their controls."""
    if not names:
        return study
    chosen = arms_named(study, names)
    beside = {control for arm in chosen for run in arm.runs for control in run.controls.values()}
    beside |= {run.control for arm in chosen for run in arm.runs if run.control}
    arms = [arm for arm in study.arms if arm in chosen or {run.name for run in arm.runs} & beside]
    return replace(study, arms=arms)


def _sized(chart: charts.Chart, width: float, font: str) -> dict[str, Any]:  # Any: JSON
    """A specification that is `width` inches wide with all its labels; a pixel is a point."""
    spec = chart.to_dict(validate=False)
    text = {"labelFontSize": FONT, "titleFontSize": FONT, "labelLimit": 0, "titleLimit": 0}
    config = {**spec["config"], "font": font}
    config["axis"] = {**config["axis"], **text, "labelPadding": 3}
    config["legend"] = {**config["legend"], **text, "symbolSize": 40, "columnPadding": 6}
    config["title"] = {**config["title"], "fontSize": FONT}
    if width == min(WIDTHS):  # a long title in the middle of the axis would leave the figure
        config["axisX"] = {"titleAnchor": "end"}
    if legend := spec.get("encoding", {}).get("color", {}).get("legend"):
        legend["gradientLength"] = BAR  # the colour bar fits a column
    fit = {"type": "fit-x", "contains": "padding"}
    if isinstance(spec["height"], int):
        spec["height"] = min(spec["height"], MAX_HEIGHT)
    return spec | {"width": width * POINTS, "padding": 2, "autosize": fit, "config": config}


def _in_inches(svg: str) -> str:
    """An SVG whose own width and height, the first that it has, are in inches."""
    size = r'\b(width|height)="([\d.]+)"'
    return re.sub(size, lambda one: f'{one[1]}="{float(one[2]) / POINTS:.4g}in"', svg, count=2)
