"""What the page draws of conflicts: plain lists and numbers, three digits each."""

from collections.abc import Mapping

from gradsurg.report.conflict_text import about_tasks, lost_most, measured_steps, sharpest
from gradsurg.report.conflicts import ConflictSeries, Floats, Lines
from gradsurg.report.study_report import StudyReport

Json = dict[str, object]
DIGITS = 3


def conflict_data(report: StudyReport) -> list[Json]:
    """Each arm and group, in the order of the arms; `first` where it is the sharpest of an arm."""
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    first = {id(one) for one in sharpest(report.conflicts)}
    return [
        {
            **_series(one),
            "arm": places[one.arm.name],
            "first": id(one) in first,
            "lost": lost_most(one, report.conflicts),
        }
        for one in report.conflicts
    ]


def _series(series: ConflictSeries) -> Json:
    means = series.means
    pairs = means.pairs
    return {
        "name": series.name,
        "n": means.runs,
        "measured": measured_steps(means),
        "tasks": means.tasks,
        "about": about_tasks(series.group),
        "ends": series.ends,
        "pairs": series.pairs,
        "of": len(pairs),
        "sharpest": [*pairs[0], _short(float(means.cosines[pairs[0][1], pairs[0][0]]))]
        if pairs
        else None,
        "cosines": _list(series.cosines),
        "overall": [_short(float(means.cosines[b, a])) for a, b in series.pairs],
        "shown": series.shown,
        "weights": None if series.weights is None else _lines(series.weights),
        "decrease": _lines(series.decrease),
        "single": {name: _short(found) for name, found in means.single.items()},
        "perTask": {
            "norm": _list(means.norms),
            "weight": _list(means.weights),
            "decrease": _list(means.decrease),
            "lost": _list(means.lost),
        },
        "others": _others(means.others),
    }


def _others(others: Mapping[str, tuple[float, Floats]]) -> list[list[object]]:
    """Names, cosine and weights; those that are equal in all digits shown are one."""
    equal: dict[str, list[str]] = {}
    shown: dict[str, list[object]] = {}
    for name, (cosine, weights) in others.items():
        key = repr((_short(cosine), _list(weights)))
        equal.setdefault(key, []).append(name)
        shown.setdefault(key, [_short(cosine, 5), _list(weights)])
    return [[", ".join(names), *shown[key]] for key, names in equal.items()]


def _lines(lines: Lines) -> Json:
    return {"mean": _list(lines.mean), "low": _list(lines.low), "high": _list(lines.high)}


def _list(values: Floats) -> list[object]:
    if values.ndim > 1:
        return [_list(row) for row in values]
    return [_short(float(value)) for value in values]


def _short(found: float, digits: int = DIGITS) -> float | None:
    """Few digits, and whole numbers without a point."""
    if found - found != 0:  # NaN and infinity
        return None
    short = float(f"{found:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
