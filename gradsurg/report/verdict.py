"""The verdict of a study in one sentence, and sentences on targets and sweeps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from math import inf
from statistics import fmean
from typing import Any

import polars as pl

from gradsurg.experiment.run_directory import UNTIL, UNTIL_REACHED
from gradsurg.report.compare import PARALLEL, PLAIN
from gradsurg.report.measures import parts, times_to_target
from gradsurg.report.study import Study
from gradsurg.report.sweeps import best_arms, first_trends
from gradsurg.report.wording import (
    amount,
    amounts,
    better,
    capital,
    count,
    listed,
    p_text,
    size,
    sizes,
    title,
    value,
)
from gradsurg.stats import (
    MAX_P,
    MIN_FOR_P,
    TOO_FEW,
    UNCLEAR,
    Margin,
    seeds_needed,
    sign_flip_is_exact,
)

Row = Mapping[str, Any]  # Any: one row of the frame of `compare`

DOES = {"higher": "raises", "lower": "lowers"}
MARGINS = {
    "better": "{arm} is better than {against} in {metric}{at}",
    "worse by more than the margin": "{arm} is worse than {against} in {metric} by more than "
    "{margin}{at}",
    "worse": "{arm} is worse than {against} in {metric}{at}, and whether by more than {margin} is "
    "open",
    "beyond the margin": "{arm} differs from {against} in {metric} by more than {margin}{at}",
    "equivalent": "{arm} and {against} are equivalent in {metric} within {margin}{at}",
    "not worse": "{arm} is not worse than {against} in {metric} by {margin} or more{at}",
    "undecided": "whether {arm} and {against} are equivalent in {metric} within {margin}{at} is "
    "open",
}
"""How the sentence begins that answers the question of a margin."""
BESIDE = {
    "": "",
    "equivalent": ", less than the margin of {}",
    "undecided": ", and whether by more than {} is open",
}
"""Words on a margin beside a direction; `undecided` is the answer without a good direction."""
MAX_NAMED = 4  # arms in one list of a sentence
NO_CLEAR = "no clear difference in"
NEARLY_PARALLEL, LENGTH_CHANGED = 0.99, 1.2
"""Least mean cosine of a transform that acts on the length of a gradient alone, and the factor from
which on its length counts as changed."""


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

    Direction, size, rate, steps and tuning, interval, p, wins and data; seeds that diverged come
    first. Of several arms those with a clear difference are named, and the others are listed.
    `study` tells what there is where nothing can be compared, `margin` is the one that was given to
    `compare`. A study whose runs stop at a target is about the steps to it.
    """
    if study and (times := times_to_target(study).to_dicts()):
        return _of_times(times, rows_of(frame))
    margin = margin or (study.margin if study else None)
    rows = rows_of(frame)
    if study and (nothing := nothing_learned(study, rows)):
        return nothing
    compared = [row for row in rows if row["difference"] is not None]
    lost = _diverged(rows)
    if not compared:
        vacuous = [row for row in rows if row["vacuous"]]
        without = vacuous_sentence(vacuous) if vacuous else _nothing(study)
        return f"{lost}; no seed is left to compare." if lost else without
    is_one, start = len(compared) == 1, capital if not lost else str
    text = _of_one(compared[0], margin, start=start) if is_one else _of_many(compared, margin)
    if few := [row for row in compared if row["verdict"] == TOO_FEW]:
        row = max(few, key=lambda row: row["n"])
        seeds = "one training" if row["repeats"] else count(row["n"], row["unit"])
        text += f"; {seeds} {'is' if row['n'] == 1 else 'are'} too few for a test"
    return f"{lost}; over the others, {text}." if lost else f"{text}."


def _of_one(
    row: Row,
    margin: Margin | None,
    said: Collection[str] = (),
    start: Callable[[str], str] = str,
) -> str:
    """Return the verdict on an arm; `said` are the parts of `setting` that are said elsewhere.

    `start` writes the first letter of words; the name of an arm stays as it is.
    """
    key, arm, against = row["metric"], row["arm"], row["against"]
    told = evidence(row, said, is_signed=not _is_directed(row))
    metric, difference, at = title(key), amount(key, row["difference"]), _at(row, said)
    limit = size(key, margin.of(row["control"])) if margin else ""
    if _is_directed(row):
        beside = "" if against == PLAIN else f" against {against}"
        by = f"{size(key, row['difference'])}{beside}{at}"
        rest = BESIDE[row["margin"]].format(limit) if limit else ""
        return f"{arm} {DOES[row['verdict']]} {metric} by {by}{rest} ({told})"
    if row["margin"] and limit:
        begin = start(MARGINS[row["margin"]])
        begin = begin.format(arm=arm, against=against, metric=metric, margin=limit, at=at)
        return f"{begin}: {difference} ({told})"
    if row["verdict"] == "identical":
        seeds = count(row["repeats"] or row["n"], row["unit"])
        return f"{start(metric)} is identical with {arm} and {against} in {seeds}{at}"
    if row["verdict"] == UNCLEAR:
        between = f"{metric} between {arm} and {against}"
        return f"{start(NO_CLEAR)} {between}{at}: {difference} ({told})"
    return f"{start(metric)} of {arm} minus {against}{at}: {difference} ({told})"


def _of_many(rows: Sequence[Row], margin: Margin | None) -> str:
    """The sentences on the arms with the same verdict together, the largest differences first."""
    told = []
    metrics = dict.fromkeys(row["metric"] for row in rows)
    common = _common([setting(row) for row in rows])
    said = {*common, "details"}
    if not any(row["tuned"] for row in rows):
        said |= {"rate", "steps"}  # where these differ, the arms are named by them
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
        told += [_of_one(row, margin, said) for row in alike[:MAX_NAMED]]
        told += [f"{len(alike) - MAX_NAMED} more: {word}"] * (len(alike) > MAX_NAMED)
    controls = {row["against"] for row in rows}
    against = controls.pop() if len(controls) == 1 else "their controls"
    where = f" ({common['data']})" if common.get("data") else ""
    return f"{len(rows)} arms against {against}{_joined(common)}: {'; '.join(told)}{where}"


def _unclear(rows: Sequence[Row]) -> str:
    """The arms without a clear difference, each with its difference and interval."""
    key = rows[0]["metric"]
    q = min((row["q"] for row in rows if row["q"] is not None), default=None)
    least = f"; least q {p_text(q)}" if q is not None else ""
    each = [
        f"{row['arm']}: {amount(key, row['difference'])} ({amounts(key, row['low'], row['high'])})"
        for row in rows
    ]
    return f"{NO_CLEAR} {title(key)} with {listed(each, MAX_NAMED)}{least}"


def setting(row: Row) -> dict[str, str]:
    """Return rate, steps, tuning and data of a comparison in words; empty texts if not known."""
    budget = "" if row["tuned"] is None else "not tuned"
    if row["tuned"]:
        arm, against = row["arm"], row["against"]
        tried, other = row["configurations"], row["configurations_control"]
        budget = (
            f"unequal budget: {arm} chose among {tried} configurations, {against} among {other}"
        )
        budget = f"{count(tried, 'configuration')} each" if tried == other else budget
    return {
        "rate": _rate(row),
        "steps": f"{row['steps']:,} steps" if row["steps"] else "",
        "budget": budget,
        "data": population(row),
    }


def _rate(row: Row) -> str:
    """Return the rate and other chosen values of the arm, and in brackets the control's."""
    fixed = f"lr {row['lr']:g}" if row["lr"] is not None else ""
    if not row["tuned"]:  # where the rates of two arms differ, their names have them
        return fixed if row["lr_control"] in (row["lr"], None) else ""
    ends = ("", "_control") if row["rate_tuned"] else ()
    rates = [f"lr {rate:g}" if (rate := row[f"lr{end}"]) is not None else "" for end in ends]
    chosen, its = (
        ", ".join(filter(None, values))
        for values in zip(rates or ["", ""], (row["chosen"], row["chosen_control"]), strict=True)
    )
    beside = f" ({row['against']}: {its or 'nothing to choose'})" if its != chosen else " of both"
    if rates and its and its == rates[-1] and chosen == rates[0] != its:
        beside = f" ({row['against']} {row['lr_control']:g})"
    fixed = f"{fixed}, " if fixed and not rates else ""
    return f"{fixed}the chosen {chosen}{beside}" if chosen else fixed


def _common(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the parts that all settings have."""
    first, *others = settings or [{}]
    return {key: text for key, text in first.items() if all(one[key] == text for one in others)}


def _at(row: Row, said: Collection[str]) -> str:
    return _joined({key: text for key, text in setting(row).items() if key not in said})


def _joined(parts: Mapping[str, str]) -> str:
    """Return ` at lr 0.1, 500 steps, not tuned`; empty if nothing is known."""
    texts = [text for key in ("rate", "steps", "budget") if (text := parts.get(key))]
    if not texts:
        return ""
    return f"{' at ' if parts.get('rate') else ' after '}{', '.join(texts)}"


def population(row: Row) -> str:
    """Return the data that a result is of, such as `one split, 450 test examples`."""
    splits, examples = row["splits"], row["test_examples"]
    each, rest = divmod(row["planned"] or 0, splits or 1)
    if row["unit"] == "split" and each > 1 and not rest and not row["not_compared"]:
        data = f", {examples:,} test examples each" if examples else ""
        return f"{splits} splits of {each} seeds{data}"
    parts = ["one split" if splits == 1 else f"{splits} splits"] if splits else []
    parts += [f"{examples:,} test examples"] if examples else []
    return (", " if splits == 1 else " of ").join(parts)


def evidence(row: Row, said: Collection[str] = (), is_signed: bool = True) -> str:
    """Return interval, p, q, wins and data of a comparison, as they stand in brackets.

    Without signs beside a word for the direction. Of several arms a table has p and the wins:
    with `details` in `said` they are left out.
    """
    key, n, parts = row["metric"], row["n"], []
    if n > 1 and row["interval"] == "range":
        span = amounts(key, row["low"], row["high"])
        parts.append(f"range over {count(n, row['unit'])} {span}")
    elif n > 1 and row["interval"]:
        ends = (amounts if is_signed else sizes)(key, row["low"], row["high"])
        parts.append(f"{row['interval']} interval {ends}")
    if row["margin"] == "equivalent" and not _is_directed(row):
        parts.append("two one-sided tests at 0.025 each")
    elif "details" in said and row["q"] is not None:
        parts.append(f"q {p_text(row['q'])}")
    elif n >= MIN_FOR_P and row["p"] is not None:
        among = f" among the {row['family']} arms of this study" if row["family"] else ""
        test = f"{'exact ' if sign_flip_is_exact(n) else ''}sign-flip"
        parts.append(_p_and_q(row, test) + among)
    if n > 1 and "details" not in said:
        parts.append(wins(row))
    if "data" not in said and (data := population(row)):
        parts.append(data)
    return "; ".join(parts) or "one run of each"


def _is_directed(row: Row) -> bool:
    """Whether the verdict is the direction, also where it does not answer a margin by itself."""
    return row["verdict"] in DOES and row["margin"] in BESIDE


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


def nothing_learned(study: Study, rows: Sequence[Row]) -> str:
    """Return the verdict on a study in which no arm is better than chance; empty for others."""
    arms = [arm for arm in study.arms if arm.whole]
    if len(arms) < 2 or reached(study) or not all(arm.is_at_chance for arm in arms):
        return ""
    are_two, names = len(arms) == 2, [arm.name for arm in arms]
    who = f"Neither {' nor '.join(names)}" if are_two else f"None of {listed(names)}"
    common = _common([setting(row) for row in rows])
    at = _joined({part: common.get(part, "") for part in ("rate", "steps")})
    found = [run.summary["learned_nothing"] for arm in arms for run in arm.at_chance if run.summary]
    numbers = ""
    if len({(one["metric"], one["what"]) for one in found}) == 1:  # one task
        key, chance = found[0]["metric"], fmean(one["beside"] for one in found)
        means = [fmean(run.number(key) or 0.0 for run in arm.at_chance) for arm in arms]
        ends = means if are_two else [min(means), max(means)]
        outcomes = (" and " if are_two else " to ").join(value(key, end) for end in ends)
        numbers = f" ({title(key)} {outcomes}, {found[0]['what']} {value(key, chance)})"
    return f"{who} learned anything{at}{numbers}: nothing to compare."


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


def below(frame: pl.DataFrame, study: Study) -> list[str]:
    """Return the sentences that belong below the verdict: on the target, on direction and size."""
    rows = [row for row in rows_of(frame) if row["difference"] is not None]
    if nothing_learned(study, rows):
        return []
    apart = parts(study)
    split = [part.to_dicts() for _, part in apart.group_by("arm", maintain_order=True)]
    alone = {group[0]["arm"] for group in split}
    lengths = [text for row in rows if (text := _about_length(row, row["arm"] in alone))]
    both = _turned_and_scaled([row for row in rows if row["arm"] not in alone])
    told = [_parts_sentence(group) for group in split]
    return [*reached(study), *lengths[:MAX_NAMED], *both, *told[:MAX_NAMED]]


def _about_length(row: Row, is_split: bool) -> str:
    """Return a sentence on a transform that changed the length of the gradients alone."""
    cosine, low, high = row["cosine"], row["norm_low"], row["norm_high"]
    if not _changed_length(row) or row["verdict"] == "identical" or cosine < NEARLY_PARALLEL:
        return ""
    done, by = "changed the length of", f"multiplied by {_from_to(low, high)}"
    if high <= 1 and low:
        done, by = "shortened", f"divided by {_from_to(1 / high, 1 / low)}"
    elif low >= 1:
        done = "lengthened"
    begin = f"{row['arm']} only {done} the {{}} (cosine {cosine:.2f}, norms {by})"
    if row["scale_free"]:
        begin = begin.format("gradients")
        return f"{begin}: a constant scale cancels in the updates of {row['optimizer']}."
    begin = begin.format("step")
    compares = "this compares learning rates"
    compares += ", one for each site" * (not low or high / low > LENGTH_CHANGED)
    if cosine >= PARALLEL:  # a norm-matched control would be the same training
        return f"{begin}: {compares}; add tune=lr."
    if is_split:
        return f"{begin}."
    return f"{begin}: {compares}; add tune=lr, or control=[plain,norm_matched]."


def _changed_length(row: Row) -> bool:
    """Whether the norms changed beside a control with the same rate and plain gradients."""
    low, high = row["norm_low"], row["norm_high"]
    if row["against"] != PLAIN or row["rate_tuned"] or row["cosine"] is None:
        return False
    return max(high, 1 / low if low else inf) >= LENGTH_CHANGED


def _turned_and_scaled(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on the arms of a clear difference that changed direction and length."""
    named = [
        f"{row['arm']} (norms multiplied by {_from_to(row['norm_low'], row['norm_high'])})"
        for row in rows
        if row["verdict"] in DOES and not row["scale_free"] and _changed_length(row)
        if row["cosine"] < NEARLY_PARALLEL
    ]
    told = (
        f"Direction and length of the gradients changed with {listed(named, MAX_NAMED)}: a part of "
        "the difference may be another learning rate; tune=lr or control=[plain,norm_matched] "
        "tells."
    )
    return [told] if named else []


def _from_to(low: float, high: float) -> str:
    ends = [f"{low:.2g}", f"{high:.2g}"]
    return " to ".join(dict.fromkeys(ends))


def _parts_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on the rows of an arm in the frame of `parts`."""
    total, direction, length = rows
    least, few = seeds_needed(2), ""
    if MIN_FOR_P <= total["n"] < least:
        few = f"; with so few one part alone cannot be clear (seeds={least})"
    key, arm, matched = total["metric"], total["arm"], direction["against"]
    each = [
        f"{row['part']} {amount(key, row['difference'])}{f' ({x})' if (x := _short(row)) else ''}"
        for row in rows
    ]
    return (
        f"{capital(title(key))} with {arm}: {each[0]} = {each[1]} + {each[2]}. Direction is "
        f"{arm} minus {matched}, size is {matched} minus {length['against']}, over "
        f"{count(total['n'], total['unit'])}{few}."
    )


def _short(row: Row) -> str:
    """Return the interval, p and q of a difference without their names."""
    texts = [amounts(row["metric"], row["low"], row["high"])] * (row["n"] > 1)
    has_p = row["n"] >= MIN_FOR_P and row["p"] is not None
    return "; ".join([*texts, *[_p_and_q(row, "").strip()] * has_p])


def reached(study: Study) -> list[str]:
    """Return how many seeds of each arm reached the stopping condition, and a sentence that the
    outcomes of such arms are no comparison. [] without a condition."""
    asked = [run for run in study.all_runs if UNTIL_REACHED in (run.summary or {})]
    if not asked:
        return []
    told = []
    for arm in study.arms:
        ends = [run.summary[UNTIL_REACHED] for run in arm.runs if run in asked and run.summary]
        told += [f"{sum(map(bool, ends))} of {count(len(ends), 'seed')} of {arm.name}"] * bool(ends)
    return [
        f"{(asked[0].summary or {})[UNTIL]} was reached by {listed(told)}.",
        "Outcomes are those at the step at which each run has ended, mostly at the target: they do "
        "not compare the arms.",
    ]


def _of_times(times: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return the verdict on the steps to the target."""
    about = {row["arm"]: row for row in rows}
    common = _common([setting(about[one["arm"]]) for one in times if one["arm"] in about])
    if common.get("steps"):
        common["steps"] = f"at most {common['steps']}"
    at = _joined(common)
    rest = [f"checked every {every} steps"] if (every := _shared(times, "every")) else []
    part = "validation" if times[0]["until"].startswith("validation/") else "test"
    if examples := _shared(times, "examples"):
        rest.append(f"on {examples:,} {part} examples")
    about_target = f"; {', '.join(rest)}" if rest else ""
    never = f" (a seed that never reached it counts as latest{about_target})"
    if len(times) == 1:
        return f"{_of_time(times[0], at, capital)}{never}."
    told = [_of_time(one, "") for one in times]
    return f"{len(times)} arms against their controls{at}: {'; '.join(told)}{never}."


def _shared(rows: Sequence[Row], column: str) -> int | None:
    """Return the value that all rows have; None if there is no such value."""
    values = {row[column] for row in rows}
    return values.pop() if len(values) == 1 else None


def _of_time(one: Row, at: str, start: Callable[[str], str] = str) -> str:
    n, arm, against = one["n"], one["arm"], one["against"]
    both = len(one["both"] or ())
    median = ""
    if both:
        seeds = f" of the {both} in which both did" if both < n else ""
        steps = f"{one['treated']:,g} and {one['control']:,g} steps"
        median = f"; medians{seeds} {steps}, median difference {one['median']:+,g}"
    counts = f"sooner in {one['sooner']} and later in {one['later']} of {count(n, 'seed')}"
    p = f", {_p_and_q(one, 'exact sign test')}" if n >= MIN_FOR_P else ", too few for a test"
    if n >= MIN_FOR_P and max(one["p"], one["q"] or 0) <= MAX_P:
        word = "sooner" if one["sooner"] > one["later"] else "later"
        return f"{arm} reaches {one['until']} {word} than {against}{at}: {counts}{p}{median}"
    return f"{start('steps')} to {one['until']} with {arm} and {against}{at}: {counts}{p}{median}"


def answer(study: Study, frame: pl.DataFrame, margin: Margin | None = None) -> list[str]:
    """Return the sentences on the arms: best against best, the verdict, and those below it."""
    told = [sentence(frame, study, margin), *below(frame, study)]
    if reached(study) or nothing_learned(study, rows_of(frame)):
        return told
    return [*map(best_sentence, best_arms(study, margin).iter_rows(named=True)), *told]


def sweeps(study: Study, frame: pl.DataFrame) -> list[str]:
    """Return a sentence for each trend of the first metric."""
    if reached(study) or nothing_learned(study, rows_of(frame)):
        return []  # outcomes at a target or at chance have no trend
    return [trend_sentence(row) for row in first_trends(study, frame)]


def trend_sentence(row: Row) -> str:
    """Return a sentence on a row of `trends`."""
    key, swept = row["metric"], f"{row['key']} ({row['name']})"
    change, still = f"the difference in {title(key)}", ""
    if row["inactive"]:
        acts = f"acts at {_numbers(row['acting'])}, and " if row["acting"] else ""
        still = f" It {acts}changes nothing at {_numbers(row['inactive'])}."
    if row["size"] is None:
        return f"Too few values of {swept} change anything for a trend.{still}"
    span = amounts(key, row["low"], row["high"])
    p = _p_and_q(row, "trend's sign-flip")
    told = f"95 % interval of this change {span}; {p}; " if span else ""
    further = f"n = {row['n']}; a further test, not among the q of the arms"
    between = f"from {row['acting'][0]:g} to {row['acting'][-1]:g}"
    ends = f"{amount(key, row['size'])} {between}"
    if row["direction"]:
        begin = f"{capital(change)} {row['direction']} with {swept}, by {size(key, row['size'])} "
        begin += between
        return f"{begin} ({told}{further}).{still}"
    at = f"{row['extreme']} at {row['peak'] or 0:g}, {amount(key, row['peak_difference'])}"
    if is_clear_peak(row):
        p = _p_and_q({"p": row["peak_p"], "q": row["peak_q"]}, "the larger sign-flip")
        return (
            f"Over {swept}, {change} is {at}, and differs from both ends ({p}; {further}); "
            f"{ends}.{still}"
        )
    inside = f"; the means are {at}" if row["extreme"] else ""
    return f"No clear trend of {change} with {swept}: {ends} ({told}{further}){inside}.{still}"


def is_clear_peak(row: Row) -> bool:
    """Whether the outcome at a dose inside differs from that at both ends, by a row of `trends`."""
    p_and_q = row["peak_p"], row["peak_q"] or 0
    return row["n"] >= MIN_FOR_P and row["peak_p"] is not None and max(p_and_q) <= MAX_P


def _numbers(values: Sequence[float]) -> str:
    return listed([f"{one:g}" for one in values])


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
    edge = f"; the best of {row['edge']} is at the edge: sweep further" if row["edge"] else ""
    return (
        f"Each at its best {row['key']}, chosen on {chosen}: {' against '.join(arms)}, "
        f"{amount(key, row['difference'])} ({evidence(row)}), which is {gain} at the best{edge}."
    )
