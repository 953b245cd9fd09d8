"""What the page's scripts draw from: plain lists and numbers, four digits each."""

from collections.abc import Sequence
from statistics import median

from gradsurg.effects.tables import number as plain
from gradsurg.report.alone import alone_rows
from gradsurg.report.certainty import p_text
from gradsurg.report.curves import Curve
from gradsurg.report.effect_series import EffectMap, Norms
from gradsurg.report.outcomes import Cost, Outcome, UpdateEffect
from gradsurg.report.pareto import Front, clusters, ends_of
from gradsurg.report.reading import Found
from gradsurg.report.study_report import StudyReport
from gradsurg.report.update_line import NUMBERS, of_how_much
from gradsurg.report.wording import amount, interval, is_share, title, value
from gradsurg.training.run_directory import CONFIG

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
