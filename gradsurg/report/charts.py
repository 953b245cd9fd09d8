"""Parts of all charts: colours, style, the tables they draw, and helpers for Altair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import altair as alt

Spec = dict[str, Any]  # Any: Vega-Lite as JSON
Columns = dict[str, list[Any]]  # Any: numbers and texts, None where one is missing
# Okabe and Ito: distinct for all kinds of colour vision, and in grey.
TREATED, CONTROL, UNCLEAR, BAD = "#0072b2", "#d55e00", "#767676", "#a3261d"
INK, SOFT, LINE, GRID, PAPER = "#1b1d22", "#565b66", "#b9b6af", "#eceae6", "#ffffff"
TASKS = (TREATED, CONTROL, "#009e73", "#cc79a7", "#8c6d00", "#3d3db8", "#222222", UNCLEAR)
DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3])
DARK = {
    TREATED: "#74b9f5",
    CONTROL: "#f0a860",
    UNCLEAR: "#a4a9b4",
    BAD: "#ff9d92",
    INK: "#e9e8e4",
    SOFT: "#a9aeb9",
    LINE: "#4a505c",
    GRID: "#282c34",
    PAPER: "#14161a",
    "#009e73": "#4fd1a5",
    "#cc79a7": "#ef9bc9",
    "#8c6d00": "#e6d36a",
    "#3d3db8": "#a9a6ff",
    "#222222": "#f4f4f2",
}
"""The colours of the dark theme, by those of the light one."""
CONFIG: Spec = {
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "labelColor": SOFT,
        "titleColor": SOFT,
        "gridColor": GRID,
        "domainColor": LINE,
        "tickColor": LINE,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 260,
        "labelPadding": 5,
    },
    "legend": {
        "labelColor": SOFT,
        "titleColor": SOFT,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelLimit": 260,
        "titleLimit": 320,
    },
    "title": {"color": INK, "subtitleColor": SOFT, "anchor": "start", "fontSize": 12},
}
MAX_NAME = 34
ROW = 24  # height of an arm, in pixels


@dataclass(frozen=True)
class Grid:
    """A table stored as matrices, smaller than its rows: one row for each label and step."""

    labels: Columns
    steps: Sequence[int]
    values: Mapping[str, list[list[float | None]]]


Table = Columns | Grid


@dataclass(frozen=True)
class Panel:
    """One chart: a Vega-Lite view, its data, and the limits to be filled into the view.

    A view is Vega-Lite; it refers to its data by name and holds `{"expr": key}` for each key of
    `limits`. Panels of one kind share their view. `summary` is the text for screen readers.
    """

    title: str
    summary: str
    view: Spec
    data: Mapping[str, Table]
    limits: Mapping[str, object] = field(default_factory=dict)
    width: int = 250  # in a file; on the page a chart is as wide as its place
    height: int = 170


def rows_of(table: Table) -> list[dict[str, object]]:
    """A table as a list of its rows."""
    if isinstance(table, Grid):
        return [
            {**label, "step": step, **{key: rows[k][j] for key, rows in table.values.items()}}
            for k, label in enumerate(rows_of(table.labels))
            for j, step in enumerate(table.steps)
        ]
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def short(number: float | None, digits: int = 4) -> float | None:
    """A number with few digits, None for NaN and infinity; whole numbers become int."""
    if number is None or not isfinite(number):
        return None
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def cut(name: str) -> str:
    """A name of at most `MAX_NAME` characters."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def columns_of(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Columns:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    return [short(number, digits) for number in values]


def scale_of(by_log: bool, **more: Any) -> alt.Scale:  # Any: keywords of alt.Scale
    """A scale that ends where its data or its domain ends."""
    kind: dict[str, Any] = {"type": "log"} if by_log else {"type": "linear", "zero": False}
    return alt.Scale(**kind, nice=False, **more)


def zero_line(channel: str, at: float = 0) -> alt.Chart:
    """A dashed line at 0, or where nothing would have changed."""
    rule = alt.Chart(alt.sequence(1)).mark_rule(color=SOFT, strokeDash=[2, 2])
    return rule.encode(**{channel: alt.datum(at)})


def spec_of(chart: alt.Chart | alt.LayerChart | alt.FacetChart) -> Spec:
    spec = chart.to_dict(validate=False)
    return {key: item for key, item in spec.items() if key not in ("$schema", "config")}
