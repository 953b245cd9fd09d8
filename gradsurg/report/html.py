"""One HTML file with all in it: words, numbers, styles and scripts; nothing is fetched."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from types import MappingProxyType

from gradsurg.effects.tables import number as plain
from gradsurg.report.answer import alone_rows
from gradsurg.report.compare import ABOUT_SHARES, Cost, Outcome, UpdateEffect, p_text
from gradsurg.report.conflicts import (
    LOSES,
    ConflictSeries,
    Floats,
    Lines,
    about_tasks,
    lost_most,
    measured_steps,
    sharpest,
)
from gradsurg.report.load import Found
from gradsurg.report.pareto import Front, clusters, ends_of
from gradsurg.report.series import ABOUT as ABOUT_UPDATES
from gradsurg.report.series import NUMBERS, Curve, EffectMap, Norms, of_how_much
from gradsurg.report.study import StudyReport
from gradsurg.report.wording import amount, count, interval, is_share, title, unbroken, value
from gradsurg.training.run_directory import CONFIG

PARTS = Path(__file__).parent / "page"
EMPTY: Mapping[str, bytes] = MappingProxyType({})
SCRIPTS = (
    "draw.js",
    "outcome.js",
    "fronts.js",
    "curves.js",
    "effects.js",
    "conflicts.js",
    "runs.js",
    "start.js",
)


def page(
    report: StudyReport, refresh: float | None = None, pictures: Mapping[str, bytes] = EMPTY
) -> str:
    """The page; with `refresh` it loads itself anew every so many seconds.

    `pictures` are the PNG files that it shows, by the names that they have beside it.
    """
    data = page_data(report) | {"conflicts": conflict_data(report), "refresh": refresh}
    parts = {name: (PARTS / name).read_text() for name in ("page.css", *SCRIPTS)}
    return Template((PARTS / "page.html").read_text()).substitute(
        study=escape(report.folder.name),
        answer=escape(unbroken(report.answer)),
        cautions="".join(f"<li>{escape(text)}</li>" for text in report.cautions),
        states=_states(report),
        effort="".join(f"<li>{escape(text)}</li>" for text in report.effort),
        tests=escape(report.about_tests),
        about_shares=escape(_sentence(ABOUT_SHARES)),
        about_updates=escape(ABOUT_UPDATES),
        loses=escape(LOSES),
        no_ways="" if pictures else " hidden",
        ways="".join(_picture(name, content) for name, content in pictures.items()),
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        style=parts["page.css"],
        # "</script>" in a name must not end the script
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script="\n".join(parts[name] for name in SCRIPTS),
    )


def _picture(name: str, content: bytes) -> str:
    """One that is in the page itself; beside it lies the same to print."""
    said = escape(name)
    address = f"data:image/png;base64,{b64encode(content).decode()}"
    alone = "".join(f' <a href="{said}.{end}">{end.upper()}</a>' for end in ("png", "svg"))
    return (
        f'<figure class="picture"><img alt="{said}: ways over the contours of the losses" '
        f'src="{address}"><figcaption>{said}:{alone}</figcaption></figure>'
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _states(report: StudyReport) -> str:
    shown = [
        f'<li class="state {state}"><b>{number}</b> {state}</li>'
        for state, number in report.states.items()
    ]
    return f"<li><b>{len(report.runs)}</b> {count(len(report.runs), 'run').split()[1]}</li>" + (
        "".join(shown)
    )


Json = dict[str, object]


def page_data(report: StudyReport) -> Json:
    """Everything, arms by their place in `arms`."""
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    by_arm = [_control_place(report, place) for place in range(len(report.arms))]
    return {
        "study": report.folder.name,
        "metrics": [
            {"key": key, "title": name, "share": is_share(key)}
            for key, name in report.metrics.items()
        ],
        "arms": [
            {
                "name": arm.name,
                "control": control,
                "isControl": arm.is_control,
                "n": len(arm.whole),
                "planned": len(arm.runs),
            }
            for arm, control in zip(report.arms, by_arm, strict=True)
        ],
        "outcomes": [_outcome(outcome, places) for outcome in report.outcomes if outcome.is_known],
        "shares": [
            {**_outcome(outcome, places), "link": outcome.link} for outcome in report.shares
        ],
        "alone": alone_rows(report.alone, list(report.metrics)),
        "curveMetrics": [
            {"key": key, "title": title(key), "share": is_share(key)}
            for key in dict.fromkeys(curve.metric for curve in report.curves)
        ],
        "curves": [_curve(curve, places) for curve in report.curves],
        "maps": [_map(found, places) for found in report.maps],
        "norms": [_norms(found, places) for found in report.norms],
        "doses": [
            {"key": d.key, "name": d.name, "x": d.doses, "arms": [places[a.name] for a in d.arms]}
            for d in report.doses
        ],
        "fronts": [
            _front(front, places, several=len({one.task for one in report.fronts}) > 1)
            for front in report.fronts
        ],
        "costs": [_cost(cost, places) for cost in report.costs],
        "updateTitles": list(NUMBERS.values()),
        "updates": [_update(effect, places) for effect in report.updates],
        "runs": [_run(run, places[arm.name], report) for arm in report.arms for run in arm.runs],
    }


def _control_place(report: StudyReport, place: int) -> int | None:
    """The arm in which most of an arm's controls are."""
    arm = report.arms[place]
    names = {run.control for run in arm.runs if run.control}
    hits = [sum(run.name in names for run in other.runs) for other in report.arms]
    best = max(hits, default=0)
    return hits.index(best) if best else None


def _outcome(outcome: Outcome, places: dict[str, int]) -> Json:
    found = outcome.difference
    row: Json = {
        "arm": places[outcome.arm.name],
        "metric": outcome.metric,
        "planned": outcome.planned,
        "states": dict(outcome.states),
    }
    if found is None:
        return row
    key = outcome.metric
    boot = outcome.bootstrap
    return row | {
        "n": found.n,
        "mean": _short(found.mean, 6),
        "low": _short(found.low, 6),
        "high": _short(found.high, 6),
        "sd": _short(found.sd),
        "p": p_text(outcome.p_value),
        "q": p_text(outcome.q_value),
        "boot": f"{amount(key, boot[0])} to {amount(key, boot[1])}" if boot else None,
        "verdict": outcome.reading,
        "plain": outcome.plain,
        "said": amount(key, found.mean),
        "interval": interval(key, found),
        "treated": value(key, sum(outcome.treated) / found.n),
        "control": value(key, sum(outcome.control) / found.n),
        "seeds": list(outcome.seeds),
        "each": [_short(difference, 6) for difference in outcome.differences],
    }


def _curve(curve: Curve, places: dict[str, int]) -> Json:
    seeds = {run.name: run.seed for run in curve.arm.runs}
    states = {run.name: run.state for run in curve.arm.runs}
    return {
        "arm": places[curve.arm.name],
        "metric": curve.metric,
        "steps": curve.steps,
        "n": curve.n,
        "mean": _list(curve.mean),
        "low": _list(curve.low),
        "high": _list(curve.high),
        "runs": [
            {"seed": seeds[name], "state": states[name], "y": _list(values)}
            for name, values in curve.runs.items()
        ],
    }


def _map(found: EffectMap, places: dict[str, int]) -> Json:
    return {
        "arm": places[found.arm.name],
        "transform": found.transform,
        "n": found.n,
        "sites": found.sites,
        "ends": found.ends,
        "means": {name: [_list(row, 3) for row in rows] for name, rows in found.means.items()},
        "overall": {name: _list(values) for name, values in found.overall.items()},
    }


def _norms(found: Norms, places: dict[str, int]) -> Json:
    return {
        "arm": places[found.arm.name],
        "transform": found.transform,
        "n": found.n,
        "low": _short(found.low),
        "high": _short(found.high),
        "before": _list(found.before, 3),
        "after": _list(found.after, 3) if found.after is not None else None,
        "zeroBefore": _short(found.zero_before),
        "zeroAfter": _short(found.zero_after),
    }


def _front(front: Front, places: dict[str, int], several: bool) -> Json:
    return {
        "key": front.key,
        "title": f"{front.task} {front.metric}" if several else front.metric,
        "metric": front.metric,
        "share": is_share(front.metric),
        "lower": front.lower_is_better,
        "names": front.names,
        "axes": [
            {"low": _short(low, 6), "high": _short(high, 6), "log": by_log}
            for low, high, by_log in (ends_of(front, task) for task in range(len(front.names)))
        ],
        "pairs": [
            {"at": pair, "labels": [[*_list(at), text] for at, text in clusters(front, *pair)]}
            for pair in front.pairs
        ],
        "marks": [
            {
                "arm": places[mark.arm.name],
                "seeds": mark.seeds,
                "each": [_list(values) for values in mark.values],
                "mean": _list([mean.mean for mean in mark.means]),
                "low": _list([mean.low for mean in mark.means]),
                "high": _list([mean.high for mean in mark.means]),
                "beatenBy": [places[name] for name in mark.beaten_by],
            }
            for mark in front.marks
        ],
    }


def _cost(cost: Cost, places: dict[str, int]) -> Json:
    return {
        "arm": places[cost.arm.name],
        "n": len(cost.ratios),
        "ratio": _short(median(cost.ratios)),
        "low": _short(min(cost.ratios)),
        "high": _short(max(cost.ratios)),
        "treated": _short(cost.treated_ms),
        "control": _short(cost.control_ms),
        "measured": _short(cost.measured_ms),
    }


def _update(effect: UpdateEffect, places: dict[str, int]) -> Json:
    """Each number as it is read: its mean over runs and the interval of that."""
    shown = []
    for key in NUMBERS:
        mean = effect.means.get(key)
        ends = [mean.low, mean.high] if mean else []
        between = " to ".join(plain(end) for end in ends if end is not None)
        shown.append([plain(mean.mean) if mean else "-", between])
    return {
        "arm": places[effect.arm.name],
        "asked": of_how_much(effect.summaries),
        "numbers": shown,
    }


def _run(run: Found, place: int, report: StudyReport) -> Json:
    file = run.path / CONFIG
    text = file.read_text(errors="replace") if file.is_file() else ""
    summary = run.summary or {}
    return {
        "name": run.name,
        "arm": place,
        "seed": run.seed if run.seed >= 0 else None,
        "state": run.state,
        "reason": run.reason,
        "done": run.done,
        "steps": run.steps,
        "control": run.control,
        "values": [_short(number(summary.get(key)), 6) for key in report.metrics],
        "ms": _short(number(summary.get("time/step_ms"))),
        "config": text,
        "notes": list(summary.get("notes") or []),
    }


def number(found: object) -> float | None:
    """A number, or None for what is none."""
    return float(found) if isinstance(found, int | float) else None


def _list(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    return [_short(found, digits) for found in values]


def _short(found: float | None, digits: int = 4) -> float | None:
    """Few digits, and whole numbers without a point: this is most of the page's size."""
    if found is None or found != found or found in (float("inf"), float("-inf")):
        return None
    short = float(f"{found:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


Json_conflict_data = dict[str, object]
DIGITS = 3


def conflict_data(report: StudyReport) -> list[Json_conflict_data]:
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


def _series(series: ConflictSeries) -> Json_conflict_data:
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
        "sharpest": [
            *pairs[0],
            _short_conflict_data(float(means.cosines[pairs[0][1], pairs[0][0]])),
        ]
        if pairs
        else None,
        "cosines": _list_conflict_data(series.cosines),
        "overall": [_short_conflict_data(float(means.cosines[b, a])) for a, b in series.pairs],
        "shown": series.shown,
        "weights": None if series.weights is None else _lines(series.weights),
        "decrease": _lines(series.decrease),
        "single": {name: _short_conflict_data(found) for name, found in means.single.items()},
        "perTask": {
            "norm": _list_conflict_data(means.norms),
            "weight": _list_conflict_data(means.weights),
            "decrease": _list_conflict_data(means.decrease),
            "lost": _list_conflict_data(means.lost),
        },
        "others": _others(means.others),
    }


def _others(others: Mapping[str, tuple[float, Floats]]) -> list[list[object]]:
    """Names, cosine and weights; those that are equal in all digits shown are one."""
    equal: dict[str, list[str]] = {}
    shown: dict[str, list[object]] = {}
    for name, (cosine, weights) in others.items():
        key = repr((_short_conflict_data(cosine), _list_conflict_data(weights)))
        equal.setdefault(key, []).append(name)
        shown.setdefault(key, [_short_conflict_data(cosine, 5), _list_conflict_data(weights)])
    return [[", ".join(names), *shown[key]] for key, names in equal.items()]


def _lines(lines: Lines) -> Json_conflict_data:
    return {
        "mean": _list_conflict_data(lines.mean),
        "low": _list_conflict_data(lines.low),
        "high": _list_conflict_data(lines.high),
    }


def _list_conflict_data(values: Floats) -> list[object]:
    if values.ndim > 1:
        return [_list_conflict_data(row) for row in values]
    return [_short_conflict_data(float(value)) for value in values]


def _short_conflict_data(found: float, digits: int = DIGITS) -> float | None:
    """Few digits, and whole numbers without a point."""
    if found - found != 0:  # NaN and infinity
        return None
    short = float(f"{found:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
