"""Swept numbers: effects over the dose of a transform, and best arm against best arm."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import polars as pl

from gradsurg.report.arms import ABOUT_SURGERY, UNSAID, Arm
from gradsurg.report.compare import BETTER, SCHEMA, compared
from gradsurg.report.load import canonical
from gradsurg.report.study import AREA, Study
from gradsurg.report.wording import is_share
from gradsurg.stats import MAX_P, Margin, benjamini_hochberg, trend

MIN_DOSES = 3  # two points are a comparison, not a curve


@dataclass(frozen=True)
class Dose:
    """The treated arms that differ in one number of the config only, by its value."""

    key: str
    name: str
    arms: Mapping[float, Arm]


def dose_groups(study: Study) -> list[Dose]:
    """Every set of at least three treated arms of one label with that many values of one number."""
    treated = [arm for arm in study.arms if not arm.is_control and arm.config]
    groups = []
    for key in _swept(treated):
        repeats: Counter[str] = Counter()
        sets: dict[str, dict[float, Arm]] = {}
        for arm in treated:
            dose = arm.config.get(key)
            if isinstance(dose, int | float) and not isinstance(dose, bool):
                rest = {other: item for other, item in arm.config.items() if other != key}
                sets.setdefault(canonical([arm.runs[0].label, rest]), {})[float(dose)] = arm
        for members in sets.values():
            if len(members) >= MIN_DOSES:
                arms = dict(sorted(members.items()))
                name = _shared_name([*arms.values()])
                repeats[name] += 1  # groups that differ in a user's code alone are numbered
                number = f" #{repeats[name]}" * (repeats[name] > 1)
                groups.append(Dose(key, f"{name}{number}", arms))
    return groups


def _swept(arms: Sequence[Arm]) -> list[str]:
    """Return the keys of the config of which these arms have several values."""
    values: dict[str, set[str]] = {}
    for key, item in chain.from_iterable(arm.config.items() for arm in arms):
        if key.partition(".")[0] not in UNSAID:
            values.setdefault(key, set()).add(repr(item))
    return [key for key, found in values.items() if len(found) > 1]


def _shared_name(arms: Sequence[Arm]) -> str:
    """The parts that all arms' names have in common, or their label if there are none."""
    first, *parts = (arm.name.split(", ") for arm in arms)
    shared = [part for part in first if all(part in other for other in parts)]
    label = [] if first[0] in shared else [arms[0].runs[0].label]
    return ", ".join([*label, *shared])


def doses(study: Study, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the comparisons of a `frame` by dose: its columns and name, label, key and dose."""
    parts = [
        pl.DataFrame(
            {
                "name": one.name,
                "label": next(iter(one.arms.values())).runs[0].label,
                "key": one.key,
                "dose": [*one.arms],
                "arm": [arm.name for arm in one.arms.values()],
            }
        )
        for one in dose_groups(study)
    ]
    empty = pl.DataFrame(
        schema={**dict.fromkeys(("name", "label", "key"), pl.String), "dose": pl.Float64}
        | {"arm": pl.String}
    )
    rows = frame.filter(pl.col("block").is_null(), pl.col("difference").is_not_null())
    return pl.concat([empty, *parts], how="vertical_relaxed").join(
        rows, on="arm", maintain_order="left"
    )


TRENDS = {
    **dict.fromkeys(("name", "key", "metric"), pl.String),
    "n": pl.Int64,
    "direction": pl.String,
    **dict.fromkeys(("size", "low", "high", "p", "q"), pl.Float64),
    "peak": pl.Float64,
    "extreme": pl.String,
    **dict.fromkeys(("peak_difference", "peak_p", "peak_q"), pl.Float64),
    **dict.fromkeys(("acting", "inactive"), pl.List(pl.Float64)),
}


def trends(study: Study, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the trend of each metric's difference over each swept number, with its size.

    Of the seeds (or blocks) with a difference at every dose. The columns up to `peak_p` are from
    `stats.trend`, over the doses that are `acting`. A dose that equals the control in every metric
    and seed is `inactive`, and no part of a trend. q is among the trends of a metric, and `peak_q`
    among their peaks; there is a `direction` only if q is at most 0.05 too.
    """
    rows: list[dict[str, Any]] = []  # Any: of a row
    different = pl.col("differences").list.eval(pl.element() != 0).list.any()
    acts = pl.col("arm").is_in(frame.filter(different)["arm"].unique().to_list())
    for (name, key, metric), part in doses(study, frame).group_by(
        "name", "key", "metric", maintain_order=True
    ):
        acting, idle = part.filter(acts).sort("dose"), part.filter(~acts).sort("dose")
        if part["dose"].n_unique() < MIN_DOSES:
            continue
        row = dict.fromkeys(TRENDS) | {"name": name, "key": key, "metric": metric, "direction": ""}
        row |= {"acting": acting["dose"].to_list(), "inactive": idle["dose"].to_list()}
        if len(acting) >= MIN_DOSES:
            if not (found := _trend(acting)):
                continue
            row |= found
        elif idle.is_empty() or acting.is_empty():
            continue
        rows.append(row)
    for metric in {row["metric"] for row in rows}:
        family = [row for row in rows if row["metric"] == metric and row["p"] is not None]
        for p, q in (("p", "q"), ("peak_p", "peak_q")) if len(family) > 1 else ():
            p_values = [1.0 if row[p] is None else row[p] for row in family]
            for row, adjusted in zip(family, benjamini_hochberg(p_values), strict=True):
                row[q] = adjusted if row[p] is not None else None
        for row in family:
            row["direction"] = row["direction"] if (row["q"] or 0) <= MAX_P else ""
    return pl.DataFrame(rows, schema=TRENDS)


def _trend(part: pl.DataFrame) -> dict[str, object]:
    """Return the numbers of a trend over rows by dose; {} if not all doses have the same seeds."""
    if part["n"].n_unique() > 1:
        return {}
    if part["seeds"].null_count() == 0 and part["seeds"].n_unique() > 1:
        return {}
    by_seed = [list(values) for values in zip(*part["differences"].to_list(), strict=True)]
    found = trend(part["dose"].to_list(), by_seed)
    low, high = found.interval or (None, None)
    at_peak = part.filter(dose=found.peak)["difference"].to_list() if found.extreme else [None]
    return {
        "n": found.n,
        "direction": found.direction,
        "size": found.size,
        "low": low,
        "high": high,
        "p": found.p_value,
        "peak": found.peak,
        "extreme": found.extreme,
        "peak_difference": at_peak[0],
        "peak_p": found.peak_p,
    }


def first_trends(study: Study, frame: pl.DataFrame) -> list[dict[str, Any]]:  # Any: of a row
    """Return the rows of `trends` of the first metric that their arms have."""
    return (
        trends(study, frame).unique(["name", "key"], keep="first", maintain_order=True).to_dicts()
    )


BEST = {
    **dict.fromkeys(("label", "key", "chosen_on", "edge"), pl.String),
    "values": pl.Int64,
    **dict.fromkeys(("treated_value", "control_value"), pl.Float64),
    **dict.fromkeys(("usable_treated", "usable_control"), pl.Int64),
}
"""The columns of `best_arms` beside a comparison's."""


def best_arms(study: Study, margin: Margin | None = None) -> pl.DataFrame:
    """Compare best arm with best arm where a number outside the surgery is swept, such as the rate.

    For each surgery, `treated_value` and `control_value` are the values with the best mean of
    `chosen_on`: the validation metric, or the metric itself without one. `usable_treated` and
    `usable_control` count the values at which no seed diverged and the mean is close to the best:
    within 5 percentage points, or within half of it for a loss. `edge` names the arms whose best of
    three values or more is the least or the greatest. Of the headline metric alone.
    """
    metric = next(iter(study.metrics_of), "")
    better = BETTER.get(metric.rpartition("/")[2])
    frames = [
        compared(study, [], {}).with_columns(pl.lit(None, t).alias(k) for k, t in BEST.items())
    ]
    for key, label, treated, controls in _rivals(study) if better else ():
        chosen_on = _chosen_on(metric, [*treated.values(), *controls.values()])
        best, usable = {}, {}
        for side, arms in (("treated", treated), ("control", controls)):
            means = {value: _mean(study, arm, chosen_on) for value, arm in arms.items()}
            known = {value: mean for value, mean in means.items() if mean is not None}
            if not known:
                break
            sign = 1 if better == "lower" else -1
            best[side] = min(known, key=lambda value: sign * known[value])
            top = known[best[side]]
            reach = 0.05 if is_share(chosen_on) else abs(top) / 2
            usable[side] = sum(
                sign * (mean - top) <= reach
                and all(run.state != "diverged" for run in arms[value].runs)
                for value, mean in known.items()
            )
        if len(best) < 2:
            continue
        first, second = treated[best["treated"]], controls[best["control"]]
        places = {(run.seed, study.block_of[run.name]): run.name for run in second.runs}
        others = {run.name: places.get((run.seed, study.block_of[run.name])) for run in first.runs}
        row = compared(study, [first], {first.name: others}, margin)
        row = row.filter(pl.col("metric") == metric, pl.col("block").is_null())
        facts = {"label": label, "key": key, "chosen_on": chosen_on, "values": len(treated)}
        at_edge = [
            name
            for name, side in ((label, "treated"), ("control", "control"))
            if len(treated) >= MIN_DOSES and best[side] in (min(treated), max(treated))
        ]
        facts["edge"] = " and ".join(at_edge)
        facts |= {f"{side}_value": value for side, value in best.items()}
        facts |= {f"usable_{side}": number for side, number in usable.items()}
        frames.append(row.with_columns(pl.lit(v, BEST[k]).alias(k) for k, v in facts.items()))
    return pl.concat(frames, how="diagonal").select(*BEST, *SCHEMA)


def _rivals(
    study: Study,
) -> list[tuple[str, str, dict[float, Arm], dict[float, Arm]]]:
    """Return key, label, and the treated and control arms by value, of each swept number."""
    home = {run.name: arm for arm in study.arms for run in arm.runs}
    treated = [arm for arm in study.arms if not arm.is_control and arm.config]
    groups = []
    for key in _swept([arm for arm in study.arms if arm.is_control]):
        sets: dict[str, dict[float, Arm]] = {}
        for arm in treated:
            value = arm.config.get(key)
            if isinstance(value, int | float) and key.partition(".")[0] not in ABOUT_SURGERY:
                rest = {other: item for other, item in arm.config.items() if other != key}
                sets.setdefault(canonical(rest), {})[float(value)] = arm
        for arms in sets.values():
            controls = {
                value: home[control]
                for value, arm in arms.items()
                if (control := next((run.control for run in arm.runs), None)) in home
            }
            if len(arms) > 1 and len({arm.name for arm in controls.values()}) > 1:
                ordered = dict(sorted(arms.items()))
                groups.append((key, _shared_name([*ordered.values()]), ordered, controls))
    return groups


def _chosen_on(metric: str, arms: Sequence[Arm]) -> str:
    """The same metric on validation data, if all finished runs have it."""
    name = f"validation/{metric.removeprefix(AREA).partition('/')[2]}"
    runs = [run for arm in arms for run in arm.whole]
    return name if all(run.number(name) is not None for run in runs) else metric


def _mean(study: Study, arm: Arm, metric: str) -> float | None:
    values = [value for run in arm.whole if (value := study.outcome(run, metric)) is not None]
    return fmean(values) if values else None
