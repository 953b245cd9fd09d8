"""The verdict of a study in one sentence, and its cautions: a table of rules."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import polars as pl

from gradsurg.newreport.measures import times_to_target
from gradsurg.newreport.study import Study
from gradsurg.newreport.tuning import read_tunings, unequal
from gradsurg.newreport.wording import (
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
    MAX_P,
    MIN_FOR_P,
    TOO_FEW,
    UNCLEAR,
    Margin,
    detectable_effect,
    seeds_needed,
    sign_flip_is_exact,
)
from gradsurg.training.run_directory import UNTIL, UNTIL_REACHED

Row = Mapping[str, Any]  # Any: one row of the frame of `compare`

DOES = {"higher": "raises", "lower": "lowers"}
MARGINS = {
    "equivalent": "{arm} and {against} are equivalent in {metric} within {margin}",
    "not worse": "{arm} is not worse than {against} in {metric} by {margin} or more",
    "better": "{arm} is better than {against} in {metric}",
    "undecided": "Whether {arm} and {against} are equivalent in {metric} within {margin} is open",
}
"""How the sentence begins that answers the question of a margin."""
MAX_NAMED = 4  # arms in one list of a sentence


def rows_of(frame: pl.DataFrame, metric: str = "") -> list[Row]:
    """Return the comparisons of one metric, the first by default, without the rows of blocks."""
    whole = frame.filter(pl.col("block").is_null())
    key = metric or (whole["metric"][0] if len(whole) else "")
    return whole.filter(metric=key).to_dicts()


def sentence(frame: pl.DataFrame, study: Study | None = None, margin: Margin | None = None) -> str:
    """Return the verdict on the first metric of a comparison, in one sentence.

    Direction, size, interval, p, wins and population; seeds that diverged come first. Of several
    arms those with a clear difference are named, and the others counted. `study` tells what there
    is where nothing can be compared, `margin` is the one that was given to `compare`.
    """
    rows = rows_of(frame)
    compared = [row for row in rows if row["difference"] is not None]
    vacuous = [row for row in rows if row["vacuous"]]
    lost = _diverged(rows)
    if not compared:
        return f"{lost}." if lost else _vacuous(vacuous) if vacuous else _nothing(study)
    text = _of_one(compared[0], margin) if len(compared) == 1 else _of_many(compared, margin)
    if not lost:
        return f"{text}."
    if not any(text.startswith(row["arm"]) for row in compared):
        text = text[:1].lower() + text[1:]
    return f"{lost}; over the others, {text}."


def _of_one(row: Row, margin: Margin | None) -> str:
    key, arm, against, told = row["metric"], row["arm"], row["against"], evidence(row)
    difference = amount(key, row["difference"])
    if row["margin"] and margin is not None:
        limit = size(key, margin.of(row["control"]))
        names = {"arm": arm, "against": against, "metric": title(key), "margin": limit}
        return f"{MARGINS[row['margin']].format(**names)}: {difference} ({told})"
    if word := DOES.get(row["verdict"]):
        beside = "" if against == "control" else f" against {against}"
        return f"{arm} {word} {title(key)} by {size(key, row['difference'])}{beside} ({told})"
    if row["verdict"] == "identical":
        seeds = count(row["repeats"] or row["n"], row["unit"])
        return f"{capital(title(key))} is identical with {arm} and {against} in {seeds}"
    if row["verdict"] == UNCLEAR:
        between = f"{title(key)} between {arm} and {against}"
        return f"No clear difference in {between}: {difference} ({told})"
    number = "one training is" if row["repeats"] else f"{count(row['n'], row['unit'])} are"
    few = f"{number.replace('1 seed are', '1 seed is')} too few for a test"
    return f"{capital(title(key))} of {arm} minus {against}: {difference} ({told}); {few}"


def evidence(row: Row, population: bool = True) -> str:
    """Return interval, p, q, wins and population of a comparison, as they stand in brackets.

    The interval of a clear difference has the sign of the verdict's word, so none of its own.
    """
    key, n, parts = row["metric"], row["n"], []
    if n > 1 and row["interval"] == "range":
        span = amounts(key, row["low"], row["high"])
        parts.append(f"range over {count(n, row['unit'])} {span}")
    elif n > 1 and row["interval"]:
        directed = row["verdict"] in DOES and not row["margin"]
        ends = (sizes if directed else amounts)(key, row["low"], row["high"])
        parts.append(f"{row['interval']} interval {ends}")
    if n >= MIN_FOR_P and row["p"] is not None:
        exact = "exact " if sign_flip_is_exact(n) else ""
        q = f", q {p_text(row['q'])}" if row["q"] is not None else ""
        parts.append(f"{exact}sign-flip p {p_text(row['p'])}{q}")
    if n > 1:
        parts.append(wins(row))
    if row["population"] and population:
        parts.append(row["population"])
    return "; ".join(parts) or "one run of each"


def wins(row: Row) -> str:
    """Return `lower in 7 of 8 seeds`; with ties both directions are counted."""
    word, other = ("higher", "lower") if row["difference"] > 0 else ("lower", "higher")
    tied = row["higher"] + row["lower"] < row["n"]
    also = f" and {other} in {row[other]}" if tied and row[other] else ""
    return f"{word} in {row[word]}{also} of {count(row['n'], row['unit'])}"


def _of_many(rows: Sequence[Row], margin: Margin | None) -> str:
    key, controls = rows[0]["metric"], {row["against"] for row in rows}
    against = next(iter(controls)) if len(controls) == 1 else "their controls"
    column = "margin" if margin and any(row["margin"] for row in rows) else "verdict"
    phrases = []
    for word in MARGINS if column == "margin" else (*DOES, UNCLEAR, "identical", TOO_FEW):
        alike = [row for row in rows if row[column] == word]
        if alike:
            alike.sort(key=lambda row: -abs(row["difference"]))
            phrases.append(_phrase(word, alike, len(alike) == len(rows)))
    limit = ""
    if margin and column == "margin":
        limit = f" within {size(key, margin.of(rows[0]['control']))}"
    places = dict.fromkeys(row["population"] for row in rows if row["population"])
    where = f" ({'; '.join(places)})" if places else ""
    subject = f"{len(rows)} arms against {against}{limit}: {title(key)}"
    return f"{subject} is {'; '.join(phrases)}{where}"


def _phrase(word: str, rows: Sequence[Row], are_all: bool) -> str:
    """One part of the sentence on several arms: those with the same verdict, the largest first."""
    key, names = rows[0]["metric"], [row["arm"] for row in rows]
    if word in (*DOES, TOO_FEW):
        told = [
            f"{row['arm']} by {(size if word in DOES else amount)(key, row['difference'])} "
            f"({evidence(row, population=False)})"
            for row in rows
        ]
        if word in DOES:
            return f"{word} with {listed(told, MAX_NAMED)}"
        unit = f"{rows[0]['unit']}s"
        return (
            f"not tested, as fewer than {MIN_FOR_P} {unit} are too few: {listed(told, MAX_NAMED)}"
        )
    if word != UNCLEAR:
        return f"{word} with {listed(names, MAX_NAMED)}"
    one = max(rows, key=lambda row: row["high"] - row["low"])
    which = "" if are_all else f" with {names[0] if len(names) == 1 else f'{len(names)} arms'}"
    widest = f"{'widest ' if len(names) > 1 else ''}{one['interval']} interval"
    q = min((row["q"] for row in rows if row["q"] is not None), default=None)
    least = f"; {'least ' if len(names) > 1 else ''}q {p_text(q)}" if q is not None else ""
    span = amounts(key, one["low"], one["high"])
    return f"not clearly different{which} ({widest} {span}{least}; n = {one['n']})"


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


def _vacuous(rows: Sequence[Row]) -> str:
    names = listed([row["arm"] for row in rows])
    return (
        f"{names} turned no gradient (cosine 1 at every site), so the {rows[0]['vacuous']} arm is "
        f"the same training up to rounding and tells nothing about {names}; compare with "
        "control=plain."
    )


def _nothing(study: Study | None) -> str:
    runs = study.all_runs if study else []
    finished = sum(run.state == "finished" for run in runs)
    of = f"{finished} of {count(len(runs), 'run')} finished"
    if runs and all(run.arm == "control" for run in runs):
        return f"There is no treated arm to compare: {of}."
    if runs and not any(run.control for run in runs):
        return f"There is no control to compare with: {of}, and their outcomes stand alone."
    if all(run.state in ("finished", "diverged") for run in runs):
        return "No seed finished in both arms, so there is no difference to report."
    return f"Nothing can be compared yet: {of}, and no seed in both arms."


def reached(study: Study) -> list[str]:
    """Return how many seeds of each arm reached the stopping condition, and whether sooner than
    in the control; the last sentence says at which step outcomes are taken. [] without one."""
    asked = [run for run in study.all_runs if UNTIL_REACHED in (run.summary or {})]
    if not asked:
        return []
    told = []
    for arm in study.arms:
        runs = [run for run in arm.runs if run in asked]
        number = sum(bool((run.summary or {})[UNTIL_REACHED]) for run in runs)
        told += [f"{number} of {count(len(runs), 'seed')} of {arm.name}"] * bool(runs)
    lines = [f"{(asked[0].summary or {})[UNTIL]} was reached by {listed(told)}."]
    for row in times_to_target(study).iter_rows(named=True):
        q = f", q {p_text(row['q'])}" if row["q"] is not None else ""
        lines.append(
            f"{row['arm']} reached it sooner than {row['against']} in {row['sooner']} of "
            f"{count(row['n'], 'seed')} and later in {row['later']} (a seed that never did counts "
            f"as latest; exact sign test p {p_text(row['p'])}{q}"
            + (
                f"; median of {len(row['both'])} that both did {row['median']:+,g} steps"
                if row["both"]
                else ""
            )
            + ")."
        )
    return [*lines, "Outcomes are of the step at which each run has ended."]


def trend_sentence(row: Row) -> str:
    """Return a sentence on a row of `trends`."""
    key, change = row["metric"], f"the difference in {title(row['metric'])}"
    about = f"{row['key']} ({row['name']})"
    span = amounts(key, row["low"], row["high"])
    q = f", q {p_text(row['q'])}" if row["q"] is not None else ""
    told = f"95 % interval {span}; sign-flip p {p_text(row['p'])}{q}; " if span else ""
    size_text = (
        f"{amount(key, row['size'])} from the smallest to the largest ({told}n = {row['n']})"
    )
    if row["direction"]:
        return f"{capital(change)} {row['direction']} with {about}: {size_text}."
    return f"No clear trend of {change} with {about}: {size_text}."


def best_sentence(row: Row) -> str:
    """Return a sentence on a row of `best_arms`: best value against best value."""
    key, name, word = row["metric"], row["key"], row["verdict"]
    arms = [
        f"{arm} {value(key, row[side])} at {row[f'{side}_value']:g}"
        for arm, side in ((row["label"], "treated"), (row["against"], "control"))
    ]
    gain = {UNCLEAR: "no clear difference", better(key): "a gain"}.get(word, word)
    gain = "a loss" if gain in DOES else gain
    wider = row["usable_treated"] - row["usable_control"]
    usable = "as many" if not wider else "more" if wider > 0 else "fewer"
    return (
        f"Each at its best {name}, chosen on {title(row['chosen_on'])}: {' against '.join(arms)}, "
        f"{amount(key, row['difference'])} ({evidence(row)}), which is {gain} at the best; "
        f"{usable} values are usable ({row['usable_treated']} against {row['usable_control']} of "
        f"{row['values']})."
    )


def cautions(study: Study, frame: pl.DataFrame) -> list[str]:
    """Return the cautions of a study, at most one sentence for each rule of `CAUTIONS`."""
    return [text for rule in CAUTIONS.values() if (text := rule(study, frame))]


Rule = Callable[[Study, pl.DataFrame], str]


def _each(tell: Callable[[Row], str], text: str) -> Rule:
    """Return a rule on the arms in the first metric: `text` with what `tell` says of them."""

    def rule(study: Study, frame: pl.DataFrame) -> str:
        rows = [row for row in rows_of(frame) if row["difference"] is not None]
        told = list(dict.fromkeys(words for row in rows if (words := tell(row))))
        return text.format(listed(told, MAX_NAMED)) if told else ""

    return rule


def _divergence(study: Study, frame: pl.DataFrame) -> str:
    if not any(row["diverged"] or row["diverged_control"] for row in rows_of(frame)):
        return ""
    return (
        "A seed that diverged in either arm is in no mean, interval or p: they describe the "
        "surviving seeds alone."
    )


def _chance(study: Study, frame: pl.DataFrame) -> str:
    told = {
        arm: text
        for arm in sorted(study.arms, key=lambda arm: not arm.is_control)
        if (text := learned_nothing(arm.name, [run.summary or {} for run in arm.whole]))
    }
    weak = any(arm.is_control for arm in told)
    useless = ", so a comparison with it tells little" if weak else ""
    names = listed([*told.values()], MAX_NAMED)
    return f"Training did not learn anything with {names}{useless}." if told else ""


def learned_nothing(name: str, runs: Sequence[Mapping[str, Any]]) -> str:  # Any: JSON's values
    """Return in how many seeds an arm is no better than chance; empty if it has learned."""
    dead = [summary for summary in runs if summary.get("learned_nothing")]
    if not dead:
        return ""
    evidence = dead[0]["learned_nothing"]
    key = evidence["metric"]
    own = value(key, fmean(summary[key] for summary in dead))
    chance = value(key, fmean(summary["learned_nothing"]["beside"] for summary in dead))
    seeds = f"{len(dead)} of {count(len(runs), 'seed')}"
    return f"{name} in {seeds} ({title(key)} {own}, and {evidence['what']} {chance})"


def _outweighed(row: Row) -> str:
    key, (heaviest, *others) = row["metric"], sorted(row["differences"], key=abs, reverse=True)
    if len(others) < 2 or abs(heaviest) <= sum(map(abs, others)):
        return ""
    return f"{row['arm']} ({amount(key, heaviest)}, median of all {amount(key, row['median'])})"


def _skewed(row: Row) -> str:
    """Skewness beyond twice its standard error under a normal distribution."""
    n, mean, spread = row["n"], row["difference"], row["differences"]
    sd = fmean((one - mean) ** 2 for one in spread) ** 0.5
    if n < MIN_FOR_P or not sd or _outweighed(row):
        return ""
    skewness = fmean(((one - mean) / sd) ** 3 for one in spread)
    if abs(skewness) <= 2 * (6 * (n - 2) / ((n + 1) * (n + 3))) ** 0.5:
        return ""
    return f"{row['arm']} (median {amount(row['metric'], row['median'])})"


def _on_one_split(row: Row) -> str:
    """A claim about one split is none about the task: told only beside a claim."""
    claims = {*DOES, "equivalent", "not worse", "better"}
    if not {row["verdict"], row["margin"]} & claims or "one split" not in row["population"]:
        return ""
    examples = re.search(r"([\d,]+) test examples", row["population"])
    if not examples or not is_share(row["metric"]):
        return "new data"
    one = size(row["metric"], 1 / int(examples[1].replace(",", "")))
    return f"new data (one test example is {one})"


def _vacuous_too(study: Study, frame: pl.DataFrame) -> str:
    rows = rows_of(frame)
    vacuous = [row for row in rows if row["vacuous"]]
    return _vacuous(vacuous) if 0 < len(vacuous) < len(rows) else ""


def _tuned(study: Study, frame: pl.DataFrame) -> str:
    if not read_tunings(study.folder)[0]:
        return ""
    return (
        "The arms are compared at their chosen values, which is not a comparison of the methods: "
        f"two identical methods tuned like this differ at p <= {MAX_P} in more than 10 % of "
        "studies."
    )


def _added(study: Study, frame: pl.DataFrame) -> str:
    """Seeds of one arm that were planned by commands with different numbers of seeds."""
    for arm in study.arms:
        given = [
            re.findall(r"\bseeds?=\S+", " ".join(run.command)) for run in arm.runs if run.command
        ]
        planned = list(dict.fromkeys(" ".join(words) or "the default" for words in given))
        if len(planned) > 1 and not any(text.startswith("seed=") for text in planned):
            return (
                f"Seeds were added by a later command ({listed(planned)}): if after a look at the "
                "first ones, p is too small (11 % false alarms with looks at 8, 12 and 16 seeds)."
            )
    return ""


def _few(study: Study, frame: pl.DataFrame) -> str:
    """The number of seeds for a test at all, or the size of the effect that so many find."""
    rows = [row for row in rows_of(frame) if row["n"] and not row["repeats"]]
    if not rows or all(row["verdict"] in (*DOES, "identical") for row in rows):
        return ""
    row = min(rows, key=lambda row: row["n"])
    n, unit, key = row["n"], row["unit"], row["metric"]
    needed = seeds_needed(len(rows)) if len(rows) > 1 else MIN_FOR_P
    controls = [run for arm in study.arms if arm.is_control for run in arm.whole]
    values = [number for run in controls if (number := study.outcome(run, key)) is not None]
    sd = stdev(values) if len(values) > 2 and unit == "seed" else 0.0
    effect = detectable_effect(max(n, needed), 2**0.5 * sd) if sd else None
    found = ""
    if effect:
        found = (
            f" a difference of {size(key, effect)} in 80 % of studies, if both arms spread as the "
            f"control does (sd {size(key, sd)})"
        )
    if n < needed:
        alone = ", for an arm that differs alone," if len(rows) > 1 else ""
        more = f", which find{found}" if found else ""
        return f"A test at the level {MAX_P}{alone} needs {needed} {unit}s{more}."
    return f"{n} {unit}s find{found}, and miss most smaller ones." if found else ""


def _unfinished(study: Study, frame: pl.DataFrame) -> str:
    if {*study.states} <= {"finished", "diverged"}:
        return ""
    lost = [f"{number} {state}" for state, number in study.states.items() if state != "finished"]
    of = count(len(study.runs), "run")
    return f"Of {of}, {listed(lost)}: the table of runs has the reasons, numbers are of the others."


def _faults(study: Study, frame: pl.DataFrame) -> str:
    faults = [*study.faults, *read_tunings(study.folder)[1]]
    return f"Left out, because it cannot be read: {listed(faults, MAX_NAMED)}." if faults else ""


def _skipped(study: Study, frame: pl.DataFrame) -> str:
    steps = [n for run in study.all_runs if (n := (run.summary or {}).get("skipped_steps"))]
    of = f"{count(len(steps), 'run')} skipped {count(sum(steps), 'step')}"
    return f"{of}, because scaled gradients were not finite." if steps else ""


def _metric(study: Study, frame: pl.DataFrame) -> str:
    chosen, known = study.chosen_metrics, study.metrics_of
    if chosen and known and chosen[0] not in known:
        return f"metric={chosen[0]}: no finished run has it; there are {', '.join(known)}."
    if len(chosen) > 1:
        return f"Runs were planned with metric={listed(chosen)}; the verdict is about the first."
    return ""


def _against(kind: str) -> Callable[[Row], str]:
    return lambda row: row["arm"] if row["against"] == kind else ""


def _scale(study: Study, frame: pl.DataFrame) -> str:
    names = {row["arm"] for row in rows_of(frame) if row["against"] == "norm-matched"}
    configs = [run.config or {} for arm in study.arms if arm.name in names for run in arm.whole]
    used = {str((config.get("optimizer") or {}).get("name")) for config in configs} & SCALE_FREE
    if not used:
        return ""
    return (
        f"A constant scale of the gradients cancels in the updates of {listed(sorted(used))}: "
        "control=update_norm_matched matches the norms of the updates."
    )


def _other_controls(study: Study, frame: pl.DataFrame) -> str:
    kinds = [
        kind for run in study.all_runs for kind in run.controls if run.controls[kind] != run.control
    ]
    told = [f"{n} with control={kind}" for kind, n in Counter(kinds).items() if kind != "plain"]
    if not told:
        return ""
    return (
        f"Some runs have another control too ({listed(told)}), and are compared with the plain one "
        "here; the command with it, given again, tells the other."
    )


def _lengths(study: Study, frame: pl.DataFrame) -> str:
    if not any((run.config or {}).get("aggregator") for run in study.all_runs):
        return ""
    from gradsurg.newreport.conflicts import about_lengths  # it imports Altair

    return " ".join(about_lengths(study))


SCALE_FREE = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"}
SCALE_FREE |= {"RAdam", "RMSprop", "Rprop"}
"""Optimizers of torch.optim in whose update a constant scale of the gradients cancels."""
DIRECTION = "with the norm that it has with {}: a clear difference is due to the direction."
CAUTIONS: dict[str, Rule] = {
    "divergence": _divergence,
    "control at chance": _chance,
    "one seed outweighs": _each(_outweighed, "One seed outweighs all others together with {}."),
    "one split only": _each(
        _on_one_split,
        "Interval and p are about new seeds on this split, not about {}: splits=6 tells more.",
    ),
    "vacuous control": _vacuous_too,
    "tuned values": _tuned,
    "runs added after a look": _added,
    "few seeds": _few,
    "skew": _each(
        _skewed,
        "The test assumes differences that are symmetric about their mean, and those of {} are "
        "skewed: p can be too small.",
    ),
    "unfinished": _unfinished,
    "unreadable files": _faults,
    "skipped steps": _skipped,
    "metric": _metric,
    "norm-matched control": _each(
        _against("norm-matched"),
        f"The norm-matched arm has the gradient's direction {DIRECTION}",
    ),
    "update-norm-matched control": _each(
        _against("update-norm-matched"),
        f"The update-norm-matched arm has the direction of the plain update {DIRECTION}",
    ),
    "placebo control": _each(
        _against("placebo"),
        "The placebo arm turns each gradient as far as {}, to the same norm, in a random "
        "direction: a clear difference is due to the direction chosen.",
    ),
    "scale of gradients": _scale,
    "other controls": _other_controls,
    "update lengths": _lengths,
    "unequal tuning": lambda study, _: unequal(read_tunings(study.folder, study.arms)[0]),
    "deterministic repeats": _each(
        lambda row: f"the {row['repeats']} seeds of {row['arm']}" if row["repeats"] else "",
        "The same numbers from {}: nothing in these runs is drawn at random, so they count as one.",
    ),
    "several arms": _each(
        lambda row: "q" if row["q"] is not None and row["verdict"] != TOO_FEW else "",
        f"Several arms are compared at once: {{}} is p corrected for that, metric by metric "
        f"(Benjamini-Hochberg), and a difference is clear if both are at most {MAX_P}; an interval "
        "is that of its arm alone.",
    ),
}
"""The rules in the order in which they are told; each returns a sentence, or '' if it holds not."""
