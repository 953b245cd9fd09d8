"""Tuning: the values that each arm chose on validation data, in sentences, a table and charts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt

from gradsurg.report.charts import (
    SOFT,
    TASKS,
    Panel,
    Spec,
    columns_of,
    cut,
    scale_of,
    short,
    spec_of,
)
from gradsurg.report.load import TUNING, Arm
from gradsurg.report.wording import count, is_share, listed, title, value
from gradsurg.training.run_reader import BrokenFile, read_json

MIN_FOR_EDGE = 3  # values of a grid, one of which lies inside
WORST = 5  # a chart shows scores this many times as far from the best as the median


@dataclass(frozen=True)
class Point:
    """One point of a grid: its values by key, and the score of each tuning seed, None if it
    diverged."""

    values: Mapping[str, Any]  # Any: what JSON can hold
    scores: Mapping[int, float | None]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds that did not diverge."""
        known = [score for score in self.scores.values() if score is not None]
        return fmean(known) if known else None

    @property
    def diverged(self) -> int:
        return sum(score is None for score in self.scores.values())


@dataclass(frozen=True)
class ArmTuning:
    """The grid of one arm, its scores, and the chosen point."""

    name: str
    metric: str
    lower: bool
    axes: Sequence[Mapping[str, Any]]
    points: Sequence[Point]
    chosen: Mapping[str, Any]
    runs: Sequence[str]

    @property
    def best(self) -> Point:
        return next(point for point in self.points if point.values == self.chosen)

    @property
    def values_text(self) -> str:
        """The chosen values, as `optimizer.lr=0.1`."""
        return ", ".join(f"{key}={_shown(item)}" for key, item in self.chosen.items())

    @property
    def remarks(self) -> list[str]:
        """Reasons to widen the grid, or not to trust the choice."""
        best, remarks = self.best, []
        if best.mean is None:
            return ["all values diverged; widen the grid"]
        for axis in self.axes:
            numbers = [item for item in axis["values"] if isinstance(item, int | float)]
            at = self.chosen[axis["key"]]
            if len(numbers) == len(axis["values"]) >= MIN_FOR_EDGE and at in _ends(numbers):
                which = "smallest" if at == min(numbers) else "largest"
                remarks.append(f"{axis['key']}={_shown(at)} is the {which} of the grid: widen it")
        equal = [
            point
            for point in self.points
            if point is not best and (point.mean, point.diverged) == (best.mean, best.diverged)
        ]
        if equal:
            texts = [", ".join(_shown(item) for item in point.values.values()) for point in equal]
            remarks.append(f"as good on {title(self.metric)}: {listed(texts)}")
        if best.diverged:
            remarks.append(f"{best.diverged} of {len(best.scores)} seeds diverged with it")
        return remarks

    @property
    def sentence(self) -> str:
        """The choice and its remarks in one line."""
        best = self.best
        lost = sum(point.diverged for point in self.points)
        score = f"{title(self.metric)} {value(self.metric, best.mean)}"
        grid = f"{count(len(self.points), 'value')} x {count(len(best.scores), 'seed')}"
        diverged = f", {lost} diverged" if lost else ""
        first = f"{self.name}: {self.values_text} ({score}; {grid}{diverged})"
        return "; ".join([first, *self.remarks])


def read_tunings(folder: Path, arms: Sequence[Arm]) -> tuple[list[ArmTuning], list[str]]:
    """Return the tunings of a study, named as their arms, and a line for each broken file."""
    names = {run.name: arm.name for arm in arms for run in arm.runs}
    order = {arm.name: place for place, arm in enumerate(arms)}
    tunings, faults = _read(sorted((folder / TUNING).glob("*.json")))
    named = [
        replace(one, name=next((names[run] for run in one.runs if run in names), one.name))
        for one in tunings
    ]
    return sorted(named, key=lambda one: order.get(one.name, len(order))), faults


def tuning_text(files: Iterable[Path]) -> str:
    """Return the choices in these files for the terminal."""
    tunings, faults = _read(files)
    return "\n".join([*tuning_lines(tunings), *unequal(tunings), *faults])


def tuning_lines(tunings: Sequence[ArmTuning]) -> list[str]:
    """Return a line for each arm under a heading; [] without a tuning."""
    if not tunings:
        return []
    heading = "Chosen on validation data, with seeds that are not compared:"
    return [heading, *(f"  {one.sentence}" for one in tunings)]


def unequal(tunings: Sequence[ArmTuning]) -> list[str]:
    """Return a caution if some arms chose among more points than others."""
    sizes = {one.name: len(one.points) for one in tunings}
    if len(set(sizes.values())) < 2:
        return []
    most, least = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
    return [
        f"{most} chose among {sizes[most]} values and {least} among {sizes[least]}: more tries are "
        "an advantage of their own."
    ]


def tuning_rows(tunings: Sequence[ArmTuning]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of choices."""
    heads = ["arm", "chosen", "validation", "values", "seeds", "diverged", "remarks"]
    rows = [
        [
            one.name,
            one.values_text,
            value(one.metric, one.best.mean),
            str(len(one.points)),
            str(len(one.best.scores)),
            str(sum(point.diverged for point in one.points)),
            "; ".join(one.remarks),
        ]
        for one in tunings
    ]
    return heads, rows


def tuning_panels(tunings: Sequence[ArmTuning]) -> list[Panel]:
    """One chart for each tuned key and metric: the score of each arm over the key's values.

    With several keys, of the points that have the chosen values of the others.
    """
    groups: dict[tuple[str, str], list[ArmTuning]] = {}
    for one in tunings:
        for axis in one.axes:
            groups.setdefault((axis["key"], one.metric), []).append(one)
    return [_panel(key, metric, group) for (key, metric), group in groups.items()]


def _panel(key: str, metric: str, tunings: Sequence[ArmTuning]) -> Panel:
    axes = [axis for one in tunings for axis in one.axes if axis["key"] == key]
    grid = [item for axis in axes for item in axis["values"]]
    numeric = all(isinstance(item, int | float) for item in grid)
    by_log = numeric and min(grid) > 0 and any(axis["by_log"] for axis in axes)
    seeds, means, lost, chosen, texts = [], [], [], [], []
    known = [s for one in tunings for p in one.points for s in p.scores.values() if s is not None]
    low, high = _limits(known, tunings[0].lower)
    cuts: list[tuple[object, ...]] = []
    for one in tunings:
        name = cut(one.name)
        for point in _slice(one, key):
            at = point.values[key] if numeric else _shown(point.values[key])
            seeds += [(name, at, seed, short(score, 6)) for seed, score in point.scores.items()]
            means.append((name, at, short(point.mean, 6)))
            if point.mean is not None and not low <= point.mean <= high:
                side, limit = ("up", high) if point.mean > high else ("down", low)
                text = f"mean {value(metric, point.mean)}, outside the axis"
                cuts.append((name, at, limit, f"triangle-{side}", text))
            if point.diverged:
                text = f"{point.diverged} of {len(point.scores)} seeds diverged"
                lost.append((name, at, high if one.lower else low, text))
            if point is one.best:
                inside = None if point.mean is None else min(max(point.mean, low), high)
                chosen.append((name, at, short(inside, 6), value(metric, point.mean)))
        texts.append(one.sentence)
    return Panel(
        f"{title(metric)} over {key}",
        f"{title(metric)} over {key}, by arm. {'. '.join(texts)}",
        _view(title(metric), is_share(metric), key, numeric, by_log),
        {
            "seeds": columns_of(("arm", "value", "seed", "score"), seeds),
            "means": columns_of(("arm", "value", "score"), means),
            "lost": columns_of(("arm", "value", "score", "text"), lost),
            "cuts": columns_of(("arm", "value", "score", "shape", "text"), cuts),
            "chosen": columns_of(("arm", "value", "score", "text"), chosen),
        },
        {
            "low": low,
            "high": high,
            "first": min(grid) if numeric else 0,
            "most": max(grid) if numeric else 0,
        },
        width=340,
        height=220,
    )


def _slice(one: ArmTuning, key: str) -> list[Point]:
    """Return the points that differ from the chosen one in this key only."""
    rest = {other: item for other, item in one.chosen.items() if other != key}
    return [
        point
        for point in one.points
        if {other: item for other, item in point.values.items() if other != key} == rest
    ]


def _limits(scores: Sequence[float], lower: bool) -> tuple[float, float]:
    """Return limits of the axis that leave out scores far worse than the median."""
    if not scores:
        return 0.0, 1.0
    ordered = sorted(scores, reverse=not lower)
    best, middle = ordered[0], ordered[len(ordered) // 2]
    worst = best + WORST * (middle - best)
    worst = min(worst, ordered[-1]) if lower else max(worst, ordered[-1])
    pad = 0.06 * (abs(worst - best) or 1)
    return min(best, worst) - pad, max(best, worst) + pad


@cache
def _view(metric: str, share: bool, key: str, numeric: bool, by_log: bool) -> Spec:
    seeds, means, lost, cuts, chosen = (
        alt.Chart(alt.NamedData(name)) for name in ("seeds", "means", "lost", "cuts", "chosen")
    )
    ends = [alt.ExprRef("first"), alt.ExprRef("most")]
    title_x = key + (" (log scale)" if by_log else "")
    axis = alt.Axis(format="~g", tickCount=5, grid=False, labelOverlap=True, labelSeparation=8)
    x = alt.X("value:Q", scale=scale_of(by_log, padding=12, domain=ends), axis=axis, title=title_x)
    if not numeric:
        x = alt.X("value:N", sort=None, axis=alt.Axis(labelAngle=0), title=key)
    y = alt.Y(
        "score:Q",
        scale=alt.Scale(domain=[alt.ExprRef("low"), alt.ExprRef("high")], nice=False, zero=False),
        axis=alt.Axis(format=".3~%" if share else ".3~g", tickCount=5),
        title=metric,
    )
    legend = alt.Legend(orient="top", direction="vertical", labelLimit=340)
    color = alt.Color(
        "arm:N", sort=None, scale=alt.Scale(range=list(TASKS)), title=None, legend=legend
    )
    tips = ["arm:N", alt.Tooltip("value:Q" if numeric else "value:N", title=key)]
    layers = alt.layer(
        means.mark_line(strokeWidth=2, clip=True).encode(x=x, y=y, color=color),
        seeds.mark_point(size=18, filled=True, opacity=0.55, clip=True).encode(
            x=x, y=y, color=color, tooltip=[*tips, "seed:Q", alt.Tooltip("score:Q", title=metric)]
        ),
        lost.mark_point(size=50, shape="cross", filled=True, opacity=1).encode(
            x=x, y=y, color=color, tooltip=[*tips, "text:N"]
        ),
        cuts.mark_point(size=50, filled=True, opacity=1).encode(
            x=x,
            y=y,
            color=color,
            shape=alt.Shape("shape:N", scale=None),
            tooltip=[*tips, "text:N"],
        ),
        chosen.mark_point(size=150, strokeWidth=2.5, opacity=1, filled=False).encode(
            x=x, y=y, color=color, tooltip=[*tips, alt.Tooltip("text:N", title="chosen")]
        ),
        chosen.mark_rule(strokeDash=[3, 3], color=SOFT).encode(x=x),
    )
    return spec_of(layers)


def _read(files: Iterable[Path]) -> tuple[list[ArmTuning], list[str]]:
    tunings, faults = [], []
    for file in files:
        try:
            content = read_json(file)
            if content is not None:
                tunings.append(_parsed(file, content))
        except BrokenFile as error:
            faults.append(str(error))
    return tunings, faults


def _parsed(file: Path, content: Mapping[str, Any]) -> ArmTuning:
    try:
        control = content["role"] == "control" and content["label"] == "none"
        one = ArmTuning(
            "control" if control else str(content["label"]),
            str(content["metric"]),
            bool(content["lower"]),
            [{key: axis[key] for key in ("key", "values", "by_log")} for axis in content["axes"]],
            _points(content["rows"]),
            dict(content["chosen"]),
            list(content["runs"]),
        )
        if one.best.scores:
            return one
    except (KeyError, TypeError, ValueError, StopIteration, AttributeError):
        pass
    raise BrokenFile(file, "is not the choice of an arm")


def _points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of a grid from the rows of its seeds, in their order."""
    scores: dict[int, dict[int, float | None]] = {}
    values: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        place, score = row["place"], row["score"]
        values[place] = dict(row["values"])
        scores.setdefault(place, {})[row["seed"]] = None if score is None else float(score)
    return [Point(values[place], by_seed) for place, by_seed in scores.items()]


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    return min(numbers), max(numbers)


def _shown(item: object) -> str:
    return f"{item:g}" if isinstance(item, float) else str(item)
