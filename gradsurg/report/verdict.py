"""The verdict of a study in one sentence, and sentences on targets and sweeps."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import polars as pl

from gradsurg.experiment.run_directory import UNTIL, UNTIL_REACHED
from gradsurg.report.measures import times_to_target
from gradsurg.report.study import Study
from gradsurg.report.sweeps import best_arms, first_trends
from gradsurg.report.wording import (
    amount,
    amounts,
    better,
    capital,
    count,
    is_share,
    listed,
    p_text,
    size,
    sizes,
    title,
    value,
)
from gradsurg.stats import (
    MIN_FOR_P,
    TOO_FEW,
    UNCLEAR,
    Margin,
    sign_flip_is_exact,
)

Row = Mapping[str, Any]  # Any: one row of the frame of `compare`

DOES = {"higher": "raises", "lower": "lowers"}
MARGINS = {
    "better": "{arm} is better than {against} in {metric}",
    "worse by more than the margin": "{arm} is worse than {against} in {metric} by more than "
    "{margin}",
    "worse": "{arm} is worse than {against} in {metric}",
    "equivalent": "{arm} and {against} are equivalent in {metric} within {margin}",
    "not worse": "{arm} is not worse than {against} in {metric} by {margin} or more",
    "undecided": "whether {arm} and {against} are equivalent in {metric} within {margin} is open",
}
"""How the sentence begins that answers the question of a margin."""
MAX_NAMED = 4  # arms in one list of a sentence


def rows_of(frame: pl.DataFrame, metric: str = "") -> list[Row]:
    """Return the comparisons of one metric, without the rows of blocks.

    By default of the first metric that each arm has: arms of different tasks need not share one.
    """
    whole = frame.filter(pl.col("block").is_null())
    if metric:
        return list(whole.filter(metric=metric).iter_rows(named=True))
    first = whole.unique("arm", keep="first", maintain_order=True)
    return list(first.iter_rows(named=True))


def sentence(frame: pl.DataFrame, study: Study | None = None, margin: Margin | None = None) -> str:
    """Return the verdict on the first metric of a comparison, in one sentence.

    Direction, size, interval, p, wins and population; seeds that diverged come first. Of several
    arms those with a clear difference are named, and the others counted. `study` tells what there
    is where nothing can be compared, `margin` is the one that was given to `compare`.
    """
    margin = margin or (study.margin if study else None)
    rows = rows_of(frame)
    compared = [row for row in rows if row["difference"] is not None]
    lost = _diverged(rows)
    if not compared:
        vacuous = [row for row in rows if row["vacuous"]]
        without = vacuous_sentence(vacuous) if vacuous else _nothing(study)
        return f"{lost}; no seed is left to compare." if lost else without
    text = _of_many(compared, margin) if len(compared) > 1 else _of_one(compared[0], margin)
    if few := [row for row in compared if row["verdict"] == TOO_FEW]:
        row = max(few, key=lambda row: row["n"])
        seeds = "one training" if row["repeats"] else count(row["n"], row["unit"])
        text += f"; {seeds} {'is' if row['n'] == 1 else 'are'} too few for a test"
    if lost:
        return f"{lost}; over the others, {text}."
    return f"{text if text.startswith(compared[0]['arm']) else capital(text)}."


def _of_one(row: Row, margin: Margin | None, population: bool = True) -> str:
    key, arm, against, told = row["metric"], row["arm"], row["against"], evidence(row, population)
    metric, difference = title(key), amount(key, row["difference"])
    if row["margin"] and margin is not None and not _is_directed(row):
        limit = size(key, margin.of(row["control"]))
        if row["margin"] == "equivalent" and (word := DOES.get(row["verdict"])):
            by = size(key, row["difference"])
            return f"{arm} {word} {metric} by {by}, less than the margin of {limit} ({told})"
        begin = MARGINS[row["margin"]]
        begin = begin.format(arm=arm, against=against, metric=metric, margin=limit)
        return f"{begin}: {difference} ({told})"
    if word := DOES.get(row["verdict"]):
        beside = "" if against == "control" else f" against {against}"
        return f"{arm} {word} {metric} by {size(key, row['difference'])}{beside} ({told})"
    if row["verdict"] == "identical":
        seeds = count(row["repeats"] or row["n"], row["unit"])
        return f"{metric} is identical with {arm} and {against} in {seeds}"
    if row["verdict"] == UNCLEAR:
        between = f"{metric} between {arm} and {against}"
        return f"no clear difference in {between}: {difference} ({told})"
    return f"{metric} of {arm} minus {against}: {difference} ({told})"


def _of_many(rows: Sequence[Row], margin: Margin | None) -> str:
    """The sentences on the arms with the same verdict together, the largest differences first."""
    told = []
    metrics = dict.fromkeys(row["metric"] for row in rows)
    for word, key in product((*MARGINS, *DOES, UNCLEAR, "identical", TOO_FEW), metrics):
        alike = [
            row
            for row in rows
            if row["metric"] == key and (row["margin"] or row["verdict"]) == word
        ]
        alike.sort(key=lambda row: -abs(row["difference"]))
        if word == UNCLEAR and len(alike) > 1:
            told.append(_unclear(alike))
            continue
        told += [_of_one(row, margin, population=False) for row in alike[:MAX_NAMED]]
        told += [f"{len(alike) - MAX_NAMED} more: {word}"] * (len(alike) > MAX_NAMED)
    controls = {row["against"] for row in rows}
    against = controls.pop() if len(controls) == 1 else "their controls"
    places = dict.fromkeys(row["population"] for row in rows if row["population"])
    where = f" ({'; '.join(places)})" if places else ""
    return f"{len(rows)} arms against {against}: {'; '.join(told)}{where}"


def _unclear(rows: Sequence[Row]) -> str:
    key, widest = rows[0]["metric"], max(rows, key=lambda row: row["high"] - row["low"])
    span = amounts(key, widest["low"], widest["high"])
    q = min((row["q"] for row in rows if row["q"] is not None), default=None)
    least = f"; least q {p_text(q)}" if q is not None else ""
    names = listed([row["arm"] for row in rows], MAX_NAMED)
    return (
        f"no clear difference in {title(key)} with {names} (widest "
        f"{widest['interval']} interval {span}{least}; n = {widest['n']})"
    )


def evidence(row: Row, population: bool = True) -> str:
    """Return interval, p, q, wins and population of a comparison, as they stand in brackets.

    The interval of a clear difference has the sign of the verdict's word, so none of its own.
    """
    key, n, parts = row["metric"], row["n"], []
    if n > 1 and row["interval"] == "range":
        span = amounts(key, row["low"], row["high"])
        parts.append(f"range over {count(n, row['unit'])} {span}")
    elif n > 1 and row["interval"]:
        ends = (sizes if _is_directed(row) else amounts)(key, row["low"], row["high"])
        parts.append(f"{row['interval']} interval {ends}")
    if row["margin"] == "equivalent" and row["verdict"] not in DOES:
        parts.append("two one-sided tests at 0.025 each")
    elif n >= MIN_FOR_P and row["p"] is not None:
        parts.append(_p_and_q(row, f"{'exact ' if sign_flip_is_exact(n) else ''}sign-flip"))
    if n > 1:
        parts.append(wins(row))
    if row["population"] and population:
        parts.append(row["population"])
    return "; ".join(parts) or "one run of each"


def _is_directed(row: Row) -> bool:
    """Whether the verdict is the direction, also with a margin if the metric has no good side."""
    return row["verdict"] in DOES and row["margin"] in ("", "undecided")


def wins(row: Row) -> str:
    """Return `lower in 7 of 8 seeds`; with ties both directions are counted."""
    word, other = ("higher", "lower") if row["difference"] > 0 else ("lower", "higher")
    tied = row["higher"] + row["lower"] < row["n"]
    also = f" and {other} in {row[other]}" if tied and row[other] else ""
    return f"{word} in {row[word]}{also} of {count(row['n'], row['unit'])}"


def _p_and_q(row: Row, test: str) -> str:
    q = f", q {p_text(row['q'])}" if row["q"] is not None else ""
    return f"{test} p {p_text(row['p'])}{q}"


def _diverged(rows: Sequence[Row]) -> str:
    """Return how many seeds diverged in each arm and in its control; empty if none did."""
    hit = [row for row in rows if row["diverged"] or row["diverged_control"]]
    told = [
        f"{row['diverged']} of {count(row['ended'], 'seed')} diverged with {row['arm']} and "
        f"{row['diverged_control']} with {row['against']} (exact McNemar p "
        f"{p_text(row['p_diverged'])})"
        for row in sorted(hit, key=lambda row: -row["diverged"])
    ]
    return listed(told, MAX_NAMED)


def vacuous_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on controls that are the treatment itself."""
    names = listed([row["arm"] for row in rows])
    return (
        f"{names} turned no gradient (cosine 1 at every site), so the {rows[0]['vacuous']} arm is "
        f"the same training up to rounding and tells nothing about {names}; compare with "
        "control=plain."
    )


def _nothing(study: Study | None) -> str:
    runs = study.all_runs if study else []
    of = f"{sum(run.state == 'finished' for run in runs)} of {count(len(runs), 'run')} finished"
    if runs and all(run.arm == "control" for run in runs):
        return f"There is no treated arm to compare: {of}."
    if runs and not any(run.control for run in runs):
        return f"There is no control to compare with: {of}, and their outcomes stand alone."
    return f"Nothing can be compared: {of}, and no seed in both arms."


def reached(study: Study) -> list[str]:
    """Return how many seeds of each arm reached the stopping condition, and whether sooner than
    in the control; the last sentence says at which step outcomes are taken. [] without one."""
    asked = [run for run in study.all_runs if UNTIL_REACHED in (run.summary or {})]
    if not asked:
        return []
    told = []
    for arm in study.arms:
        ends = [run.summary[UNTIL_REACHED] for run in arm.runs if run in asked and run.summary]
        told += [f"{sum(map(bool, ends))} of {count(len(ends), 'seed')} of {arm.name}"] * bool(ends)
    lines = [f"{(asked[0].summary or {})[UNTIL]} was reached by {listed(told)}."]
    for row in times_to_target(study).iter_rows(named=True):
        both = f"; median of {len(row['both'])} that both did {row['median'] or 0:+,g} steps"
        lines.append(
            f"{row['arm']} reached it sooner than {row['against']} in {row['sooner']} of "
            f"{count(row['n'], 'seed')} and later in {row['later']} (a seed that never did counts "
            f"as latest; {_p_and_q(row, 'exact sign test')}{both if row['both'] else ''})."
        )
    return [*lines, "Outcomes are of the step at which each run has ended."]


def sweeps(study: Study, frame: pl.DataFrame, margin: Margin | None = None) -> list[str]:
    """Return a sentence for each trend of the first metric, and for best against best."""
    told = [trend_sentence(row) for row in first_trends(study, frame)]
    return told + [best_sentence(row) for row in best_arms(study, margin).iter_rows(named=True)]


def trend_sentence(row: Row) -> str:
    """Return a sentence on a row of `trends`."""
    key, change = row["metric"], f"the difference in {title(row['metric'])}"
    span = amounts(key, row["low"], row["high"])
    told = f"95 % interval {span}; {_p_and_q(row, 'sign-flip')}; " if span else ""
    begin = f"{capital(change)} {row['direction']}" if row["direction"] else ""
    return (
        f"{begin or f'No clear trend of {change}'} with {row['key']} ({row['name']}): "
        f"{amount(key, row['size'])} from the smallest to the largest ({told}n = {row['n']}; a "
        "further test, not among the q of the arms)."
    )


def best_sentence(row: Row) -> str:
    """Return a sentence on a row of `best_arms`: best value against best value."""
    key, word = row["metric"], row["verdict"]
    arms = [
        f"{arm} {value(key, row[side])} at {row[f'{side}_value']:g}"
        for arm, side in ((row["label"], "treated"), (row["against"], "control"))
    ]
    gain = {UNCLEAR: "no clear difference", better(key): "a gain"}.get(word, word)
    gain = "a loss" if gain in DOES else gain
    chosen = title(row["chosen_on"]) + ", which flatters both" * (row["chosen_on"] == key)
    wider = row["usable_treated"] - row["usable_control"]
    usable = "as many" if not wider else "more" if wider > 0 else "fewer"
    edge = f"; the best of {row['edge']} is at the edge: sweep further" if row["edge"] else ""
    return (
        f"Each at its best {row['key']}, chosen on {chosen}: {' against '.join(arms)}, "
        f"{amount(key, row['difference'])} ({evidence(row)}), which is {gain} at the best; "
        f"{usable} values are usable, within {'5 pp' if is_share(key) else 'half'} of the best "
        f"({row['usable_treated']} against {row['usable_control']} of {row['values']}){edge}."
    )
