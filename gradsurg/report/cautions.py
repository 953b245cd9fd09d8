"""The cautions of a study: a table of rules, each with a condition and at most one sentence."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median

import polars as pl

from gradsurg.report.measures import PARTS
from gradsurg.report.study import Study
from gradsurg.report.verdict import (
    DOES,
    MARGINS,
    MAX_NAMED,
    Row,
    nothing_learned,
    reached,
    rows_of,
    vacuous_sentence,
)
from gradsurg.report.wording import amount, count, is_share, listed, p_text, size, title, value
from gradsurg.stats import (
    MAX_P,
    MIN_FOR_P,
    TOO_FEW,
    seeds_needed,
    sign_flip_p_value,
)

MAX_DISTANCE, TO_SD = 5, 1.4826
"""Greatest distance of a seed from the median that is not far, in standard deviations, and one of
these in median absolute deviations of normal values. Of studies with normal differences the rule
names a seed in less than 3 %; at a distance of 3.5 in up to 5 %."""
Tell = Callable[[Study, Sequence[Row]], Iterable[str]]
"""The words of a rule on a study and the rows of its first metric; none if it does not hold."""


def cautions(study: Study, frame: pl.DataFrame) -> list[str]:
    """Return the cautions of a study, at most a sentence for each rule of `CAUTIONS`."""
    return [*by_rule(study, frame).values()]


def by_rule(study: Study, frame: pl.DataFrame) -> dict[str, str]:
    """Return the sentences of the rules that hold by the rules' names."""
    rows, told = rows_of(frame), {}
    left_out = OF_OUTCOMES if reached(study) else set[str]()
    if nothing_learned(study, rows):
        left_out = OF_OUTCOMES | OF_LEARNING
    for name, (tell, text) in CAUTIONS.items():
        if name in left_out:
            continue
        if words := list(dict.fromkeys(filter(None, tell(study, rows)))):
            told[name] = text.format(listed(words, MAX_NAMED))
    return told


def _each(tell: Callable[[Row], str]) -> Tell:
    """Return a rule on each arm that is compared."""
    return lambda _, rows: [tell(row) for row in rows if row["difference"] is not None]


def _chance(study: Study, _: Sequence[Row]) -> Iterator[str]:
    """In how many seeds of each arm training came to no more than chance."""
    told, weak = [], ""
    for arm in sorted(study.arms, key=lambda arm: not arm.is_control):
        dead = [run.summary for run in arm.at_chance]
        evidence = [summary["learned_nothing"] for summary in dead if summary]
        if evidence:
            key, what = evidence[0]["metric"], evidence[0]["what"]
            own = value(key, fmean(summary[key] for summary in dead if summary))
            chance = value(key, fmean(one["beside"] for one in evidence))
            seeds = f"{len(dead)} of {count(len(arm.whole), 'seed')}"
            told.append(f"{arm.name} in {seeds} ({title(key)} {own}, and {what} {chance})")
            if arm.is_control and arm.is_at_chance:
                weak = ": a comparison with a control at chance tells little"
    if told:
        yield listed(told, MAX_NAMED) + weak


def _worse_than_chance(study: Study, _: Sequence[Row]) -> Iterator[str]:
    """In how many seeds of each arm training made the loss worse than a constant guess.

    Seeds that the rule on chance names are left out.
    """
    for arm in study.arms:
        runs = [run for run in arm.whole if not (run.summary or {}).get("learned_nothing")]
        ends = [(run.number("train/loss"), run.number("chance_loss")) for run in runs]
        worse = [(a, b) for a, b in ends if a is not None and b is not None and a > b]
        if worse:
            own, chance = (fmean(side) for side in zip(*worse, strict=True))
            seeds = f"{len(worse)} of {count(len(arm.whole), 'seed')}"
            losses = f"{value('train/loss', own)} against {value('train/loss', chance)}"
            yield f"{arm.name} in {seeds} ({losses})"


def _decided(row: Row) -> str:
    """The seed far from all others without which the verdict changes between clear and unclear."""
    key, differences, centre = row["metric"], row["differences"], row["median"]
    distances = [abs(difference - centre) for difference in differences]
    place = distances.index(max(distances))
    others = [*differences[:place], *differences[place + 1 :]]
    spread = TO_SD * median(distances)
    if len(others) < MIN_FOR_P or not spread or distances[place] <= MAX_DISTANCE * spread:
        return ""
    # among several arms, the largest q that this p can have
    p, was_clear = sign_flip_p_value(others), row["verdict"] in DOES
    if was_clear == (p * (1 if was_clear else row["family"] or 1) <= MAX_P):
        return ""
    which = f"{row['unit']} {row['seeds'][place]}" if row["seeds"] else f"one {row['unit']}"
    values = f"{amount(key, differences[place])}, median of all {amount(key, centre)}"
    rest = f"without it {amount(key, fmean(others))}, p {p_text(p)}"
    return f"{row['arm']} rests on {which} ({values}): {rest}"


def _on_one_split(_: Study, rows: Sequence[Row]) -> Iterator[str]:
    """A claim about one split is none about the task: told only beside a claim."""
    claimed = [row for row in rows if _is_claim(row) and row["splits"] == 1]
    sizes = [
        size(row["metric"], 1 / row["test_examples"])
        for row in claimed
        if is_share(row["metric"]) and row["test_examples"]
    ]
    one = f" (one test example is {listed([*dict.fromkeys(sizes)])})" if sizes else ""
    yield f"new data{one}" if claimed else ""


def _is_claim(row: Row) -> bool:
    return bool({row["verdict"], row["margin"]} & ({*DOES, *MARGINS} - {"undecided"}))


def _edges(study: Study, _: Sequence[Row]) -> list[str]:
    tunings = [one for one in study.tunings[0] if not study.by_name.keys().isdisjoint(one.runs)]
    return [f"{one.name}: {text}" for one in tunings for text in one.edges]


def _vacuous(_: Study, rows: Sequence[Row]) -> list[str]:
    vacuous = [row for row in rows if row["vacuous"]]
    return [vacuous_sentence(vacuous)] if 0 < len(vacuous) < len(rows) else []


def _added(study: Study, _: Sequence[Row]) -> Iterator[str]:
    for arm in study.arms:
        # with fewer than six there was no test to look at
        if added := [run.looked for run in arm.runs if run.looked >= MIN_FOR_P]:
            yield f"{len(added)} of {arm.name} after {min(added)}"


def _late_margin(study: Study, rows: Sequence[Row]) -> list[str]:
    late = any(run.margin_after for run in study.all_runs) or study.margin is None
    return ["late"] if late and any(row["margin"] for row in rows) else []


def _splits(_: Study, rows: Sequence[Row]) -> list[str]:
    return [row["arm"] for row in rows if row["unit"] == "split" and row["n"] >= MIN_FOR_P]


def _unchanged(study: Study, rows: Sequence[Row]) -> list[str]:
    """The arms without a difference; between measured steps a transform may have acted."""
    different = {row["arm"] for row in rows if row["difference"]}
    idle = [arm for arm in study.arms if arm.whole and all(run.idle for run in arm.whole)]
    return [arm.name for arm in idle if arm.name not in different]


def _few(_: Study, rows: Sequence[Row]) -> Iterator[str]:
    """The number of seeds for a test at all."""
    rows = [row for row in rows if row["n"] and not row["repeats"]]
    if all(row["verdict"] in (*DOES, "identical") for row in rows):
        return
    rows = [row for row in rows if row["verdict"] != "identical"]
    row = min(rows, key=lambda row: row["n"])
    n, unit = row["n"], row["unit"]
    arms = row["family"] or len(rows)  # a job has not all rows of the study
    needed = seeds_needed(arms) if arms > 1 else MIN_FOR_P
    if n < needed:
        alone = ", for an arm that differs alone," if arms > 1 else ""
        yield f"A test at the level {MAX_P}{alone} needs {needed} {unit}s."


def _unfinished(study: Study, _: Sequence[Row]) -> list[str]:
    lost = [f"{number} {state}" for state, number in study.states.items() if state != "finished"]
    is_whole = {*study.states} <= {"finished", "diverged"}
    return [] if is_whole else [f"{count(len(study.runs), 'run')}, {listed(lost)}"]


def _skipped(study: Study, _: Sequence[Row]) -> list[str]:
    steps = [n for run in study.all_runs if (n := (run.summary or {}).get("skipped_steps"))]
    return [f"{count(len(steps), 'run')} skipped {count(sum(steps), 'step')}"] * bool(steps)


def _metric(study: Study, _: Sequence[Row]) -> Iterator[str]:
    chosen, known = study.chosen_metrics, study.metrics_of
    if chosen and known and chosen[0] not in known:
        yield f"metric={chosen[0]}: no finished run has it; there are {', '.join(known)}."
    elif len(chosen) > 1:
        yield f"Runs were planned with metric={listed(chosen)}; the verdict is about the first."


def _against(kind: str) -> Tell:
    return _each(lambda row: row["arm"] if row["against"] == kind else "")


def _scale_free(_: Study, rows: Sequence[Row]) -> list[str]:
    """The optimizers in whose update a constant scale of the gradients cancels."""
    matched = [row for row in rows if row["against"] == "norm-matched"]
    return sorted({row["optimizer"] for row in matched if row["scale_free"]})


def _other_controls(study: Study, _: Sequence[Row]) -> list[str]:
    kinds = Counter(
        kind
        for run in study.all_runs
        for kind, name in run.controls.items()
        if kind not in ("plain", *PARTS) and name != run.control
    )
    return [f"{number} with control={kind}" for kind, number in kinds.items()]


def _lengths(study: Study, _: Sequence[Row]) -> list[str]:
    if not any((run.config or {}).get("aggregator") for run in study.all_runs):
        return []
    from gradsurg.report.conflicts import about_lengths  # it imports Altair

    return [" ".join(about_lengths(study))]


OF_OUTCOMES = {"one seed decides", "one split only", "margin after a look", "few seeds"}
"""Rules on differences in outcomes, which a study with a target does not compare."""
OF_LEARNING = {"worse than a constant", "control at chance", "tuned values", "several arms"}
"""Further rules that tell nothing where no arm has learned."""
DIRECTION = "with the norm that it has with {}: a clear difference is due to the direction."
CAUTIONS: dict[str, tuple[Tell, str]] = {
    "worse than a constant": (
        _worse_than_chance,
        "At the end the train loss is above that of the best constant guess, which an untrained "
        "model nearly has, with {}: training went wrong, whatever the other metrics say.",
    ),
    "divergence": (
        lambda _, rows: (row["arm"] for row in rows if row["diverged"] or row["diverged_control"]),
        "A seed that diverged in either arm is in no mean, interval or p: they describe the "
        "surviving seeds alone.",
    ),
    "control at chance": (_chance, "Training did not learn anything with {}."),
    "one seed decides": (_each(_decided), "The verdict on {}."),
    "one split only": (
        _on_one_split,
        "Interval and p are about new seeds on this split, not about {}: splits=8 tells more.",
    ),
    "vacuous control": (_vacuous, "{}"),
    "tuned values": (
        _each(lambda row: row["arm"] if row["tuned"] and _is_claim(row) else ""),
        "Tuned arms are compared at their chosen values, which is no comparison of the methods: "
        f"two identical methods tuned like this differ at p <= {MAX_P} in 5 to 12 % of studies.",
    ),
    "edge of a grid": (_edges, "A better value can lie outside: {}."),
    "trials of a search": (
        lambda study, _: [count(len(study.trials), "trial run")] if study.trials else [],
        "{} of a search are left out: the outcomes that chose a value cannot judge it.",
    ),
    "runs added after a look": (
        _added,
        "Runs were added when others had finished ({}): if after a look at them, p can be too "
        "small (with looks at 8, 12 and 16 seeds 11 % false alarms instead of 5).",
    ),
    "margin after a look": (
        _late_margin,
        "The margin was given when outcomes were known: this is no planned test of equivalence.",
    ),
    "few seeds": (_few, "{}"),
    "nothing changed": (_unchanged, "No gradient was changed by {}: trained as the control."),
    "several splits": (
        _splits,
        "Splits share examples: interval and p are about splitting these data anew, and too narrow "
        "for new data.",
    ),
    "unfinished": (
        _unfinished,
        "Of {}: the table of runs has the reasons, numbers are of the others.",
    ),
    "unreadable files": (
        lambda study, _: [*study.faults, *study.tunings[1]],
        "Left out, because it cannot be read: {}.",
    ),
    "skipped steps": (_skipped, "{}, because scaled gradients were not finite."),
    "metric": (_metric, "{}"),
    "norm-matched control": (
        _against("norm-matched"),
        f"The norm-matched arm has the gradient's direction {DIRECTION}",
    ),
    "update-norm-matched control": (
        _against("update-norm-matched"),
        f"The update-norm-matched arm has the direction of the plain update {DIRECTION}",
    ),
    "placebo control": (
        _against("placebo"),
        "The placebo arm turns each gradient as far as {}, to the same norm, in a random "
        "direction: a clear difference is due to the direction chosen.",
    ),
    "scale of gradients": (
        _scale_free,
        "A constant scale of the gradients cancels in the updates of {}: "
        "control=update_norm_matched matches the norms of the updates.",
    ),
    "other controls": (
        _other_controls,
        "Some runs have another control too ({}), which this verdict does not use: the command "
        "with that control alone tells its comparison.",
    ),
    "update lengths": (_lengths, "{}"),
    "deterministic repeats": (
        _each(lambda row: f"the {row['repeats']} seeds of {row['arm']}" if row["repeats"] else ""),
        "The same numbers from {}: nothing in these runs is drawn at random, so they count as one.",
    ),
    "several arms": (
        _each(lambda row: "q" if row["q"] is not None and row["verdict"] != TOO_FEW else ""),
        "Several arms are compared at once: {} is p corrected for that, metric by metric "
        f"(Benjamini-Hochberg), and a difference is clear if both are at most {MAX_P}; an interval "
        "is that of its arm alone.",
    ),
}
"""The rules in the order in which they are printed: the words of each, and its sentence."""
