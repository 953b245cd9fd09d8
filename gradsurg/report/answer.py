"""The sentences of a report: the answer, its cautions, and tables shared by page and files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from types import MappingProxyType

from gradsurg.report.compare import (
    ENDED,
    Doses,
    Outcome,
    TimeToTarget,
    Trend,
    chosen_metrics,
    divergences,
    metrics_of,
    repeats_line,
    step_reached,
    times_to_target,
)
from gradsurg.report.load import STATES, Arm, LoadedRun
from gradsurg.report.wording import (
    FEW,
    Summary,
    amount,
    amounts,
    answer,
    count,
    disagreement,
    interval,
    listed,
    p_text,
    sizes,
    title,
    value,
)
from gradsurg.stats import (
    CLEAR,
    HINTS,
    MAX_P,
    MIN_FOR_P,
    UNCLEAR,
    adjusted_p_values,
    seeds_needed,
)
from gradsurg.training.run_directory import UNTIL, UNTIL_REACHED


def states(runs: Sequence[LoadedRun]) -> dict[str, int]:
    """The number of runs in each state."""
    counts = Counter(run.state for run in runs)
    return {state: counts[state] for state in STATES if counts[state]}


def paragraph(outcomes: Sequence[Outcome], arms: Sequence[Arm]) -> str:
    """Answer the study's question in one paragraph: the headline metric, arm by arm.

    Before it: how many seeds diverged, and when they reached the stopping condition.
    """
    headline = outcomes[0].metric if outcomes else ""
    of_headline = [outcome for outcome in outcomes if outcome.metric == headline]
    compared = [outcome for outcome in of_headline if outcome.difference]
    empty = [text for outcome in of_headline if (text := vacuous(outcome))]
    lost = [one.arm.name for one in of_headline if not (one.difference or one.vacuous_control)]
    first = [*diverged(arms), *reached(arms), *empty]
    if empty and not compared:
        return " ".join(first)
    if not compared:
        first = [sentence for sentence in first if sentence != ABOUT_DIVERGED]
        return " ".join([*first, _nothing_yet(arms, lost)])
    one = compared[0]
    if len(compared) == 1 and one.difference:
        sentences = [*first, answer(one.arm.name, one.plain, headline, one.difference)]
    else:
        sentences = [*first, *_of_many(compared, headline)]
    sentences += other_metrics(outcomes, headline)
    if lost:
        sentences.append(f"Nothing to compare yet for {listed(lost)}.")
    return " ".join(sentences)


def other_metrics(outcomes: Sequence[Outcome], headline: str) -> list[str]:
    """Return a sentence on the other metrics that are clearly different, with their q."""
    several = len({one.arm.name for one in outcomes if one.difference}) > 1
    clear: dict[str, list[str]] = {}
    for one in outcomes:
        if one.metric != headline and one.reading in CLEAR:
            arm = one.arm.name if several else ""
            reading = f"{title(one.metric)} is {one.reading} {'with ' if several else ''}"
            clear.setdefault(reading, []).append(f"{arm} (q {p_text(one.q_value)})".strip())
    parts = [reading + listed(arms, 4) for reading, arms in clear.items()]
    if several:
        return [f"{_capital(part)}." for part in parts]
    return [f"Also, {listed(parts)}."] if parts else []


def short_verdict(outcomes: Sequence[Outcome], arms: Sequence[Arm]) -> str:
    """Return the verdict in two sentences: the first metric, then all others without sizes.

    Before them: how many seeds diverged, when they reached the stopping condition, and which
    control is the treatment itself. Empty if nothing is compared.
    """
    metrics = dict.fromkeys(one.metric for one in outcomes if one.difference)
    clauses: dict[str, list[str]] = {}
    for metric in metrics:
        compared = [one for one in outcomes if one.metric == metric and one.difference]
        words = dict.fromkeys([*READINGS, *(one.reading for one in compared)])
        phrases = [
            f"{READINGS.get(word, word)} with {_shortly(alike, with_sizes=not clauses)}"
            for word in words
            if (alike := [one for one in compared if one.reading == word])
        ]
        clauses.setdefault(", ".join(phrases), []).append(title(metric))
    if not clauses:
        return ""
    texts = [
        f"{listed(names, len(names))} {'are' if len(names) > 1 else 'is'} {clause}"
        for clause, names in clauses.items()
    ]
    first = [one for one in outcomes if one.metric == outcomes[0].metric]
    texts = [texts[0], *_disagreements(first), "; ".join(texts[1:])]
    empty = [text for one in first if (text := vacuous(one))]
    sentences = [f"{_capital(text).removesuffix('.')}." for text in texts if text]
    return " ".join([*diverged(arms), *reached(arms), *empty, *sentences])


MAX_TRENDS = 4


def trends(doses: Sequence[Doses], outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence on the trend of the headline metric over each swept number."""
    if not outcomes:
        return []
    metric = outcomes[0].metric
    of_metric = [one for one in outcomes if one.metric == metric]
    found = [(one, trend) for one in doses if (trend := one.trend(of_metric))]
    q_values = adjusted_p_values({place: one.p_value for place, (_, one) in enumerate(found)})
    sentences = []
    for place, (dose, trend) in enumerate(found):
        q = q_values[place] if len(found) > 1 else None
        text = f"Spearman {trend.correlation:+.2f}, {_of_seeds_with_p(trend)}"
        text += f", q {p_text(q)}" if q is not None else ""
        over = f"the difference in {title(metric)}"
        of = f"{dose.key} ({dose.name})"
        if trend.n >= MIN_FOR_P and max(trend.p_value, q or 0.0) <= MAX_P:
            word = "rises" if trend.correlation > 0 else "falls"
            sentences.append(f"{_capital(over)} {word} with {of}: {text}.")
        else:
            sentences.append(f"No clear trend of {over} with {of}: {text}.")
    more = [f"{len(sentences) - MAX_TRENDS + 1} more trends are on the page."]
    return [*sentences[: MAX_TRENDS - 1], *more] if len(sentences) > MAX_TRENDS else sentences


def _of_seeds_with_p(trend: Trend) -> str:
    mean = f"a mean over {trend.n} seeds" if trend.n > 1 else "one seed"
    return f"{mean}, sign-flip p {p_text(trend.p_value)}"


READINGS = {
    **{word: word for word in CLEAR},
    **dict(zip(HINTS, ("perhaps higher", "perhaps lower"), strict=True)),
    UNCLEAR: "not clearly different",
    "identical": "identical",
    "one seed: no interval": "undecided after one seed",
    "two seeds: no interval": "undecided after two seeds",
}
"""How the short verdict says each reading, in its order."""


def _shortly(outcomes: Sequence[Outcome], with_sizes: bool) -> str:
    """One arm, with its seeds, median, mean and their intervals; of more their number."""
    one = max(outcomes, key=lambda one: abs(one.difference.median) if one.difference else 0.0)
    size = ""
    if with_sizes and one.difference and one.reading != "identical":
        text = f"{amount(one.metric, one.difference.mean)}, n = {one.difference.n}"
        if one.difference.low is not None:
            text = _sizes_in_brackets(one)
        size = f" ({text})"
    if len(outcomes) == 1:
        return f"{one.arm.name}{size}"
    most = f", most with {one.arm.name}{size}" if one.reading in (*CLEAR, *HINTS) and size else ""
    return f"{len(outcomes)} arms{most}"


def diverged(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence for each arm in which, or in whose control, a seed diverged."""
    sentences = [
        f"{one.treated} of {count(one.n, 'seed')} diverged with {one.arm.name}, {one.control} of "
        f"{one.n} in the {one.plain} arm (exact McNemar p {p_text(one.p_value)})."
        for one in divergences(arms)
    ]
    return [*sentences, ABOUT_DIVERGED] if sentences else []


def vacuous(outcome: Outcome) -> str:
    """Return a sentence on a control that is the treatment itself; empty for any other."""
    if not outcome.vacuous_control:
        return ""
    name = outcome.arm.name
    return (
        f"{name} turned no gradient (cosine 1 at every site), so the {outcome.vacuous_control} arm "
        f"is the same training up to rounding and tells nothing about {name}; compare with "
        "control=plain."
    )


def about_controls(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence for each kind of control that changes gradients itself."""
    kinds: dict[str, list[str]] = {}
    scale_free: set[str] = set()
    for outcome in outcomes:
        if outcome.difference and outcome.control_kind in ABOUT_CONTROLS:
            kinds.setdefault(outcome.control_kind, []).append(outcome.arm.name)
            if outcome.control_kind == "norm_matched":
                scale_free |= {_optimizer(run) for run in outcome.arm.whole} & SCALE_FREE
    sentences = [
        ABOUT_CONTROLS[kind].format(listed(list(dict.fromkeys(names))))
        for kind, names in kinds.items()
    ]
    if scale_free:
        sentences.append(ABOUT_SCALE.format(listed(sorted(scale_free))))
    return sentences


def _optimizer(run: LoadedRun) -> str:
    return str(((run.config or {}).get("optimizer") or {}).get("name", ""))


SCALE_FREE = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    }
)
"""Optimizers of torch.optim in whose update a constant scale of the gradients cancels."""

ABOUT_SCALE = (
    "A constant scale of the gradients cancels in the updates of {}: control=update_norm_matched "
    "matches the norms of the updates."
)


ABOUT_CONTROLS = {
    "norm_matched": "The norm-matched arm has the gradient's direction with the norm that it has "
    "with {}: a clear difference is due to the direction.",
    "update_norm_matched": "The update-norm-matched arm has the direction of the optimizer's plain "
    "update with the norm that it has with {}: a clear difference is due to the direction.",
    "placebo": "The placebo arm turns each gradient as far as {}, to the same norm, in a random "
    "direction: a clear difference is due to the direction chosen.",
}

NO_PAIR = "No seed finished in both arms, so there is no difference to report."
ABOUT_DIVERGED = "Means and medians are over the seeds in which neither arm diverged."


def cautions(
    runs: Sequence[LoadedRun], outcomes: Sequence[Outcome], arms: Sequence[Arm] = ()
) -> list[str]:
    """Return the cautions of a study, one sentence each."""
    counts = states(runs)
    sentences = []
    ended = {"finished", "diverged", "failed"}
    open_runs = sum(number for state, number in counts.items() if state not in ended)
    if open_runs:
        parts = [f"{number} {state}" for state, number in counts.items() if state not in ended]
        sentences.append(
            f"The study is unfinished: {', '.join(parts)} of {count(len(runs), 'run')}. "
            "Numbers cover what is there."
        )
    if counts.get("diverged"):
        sentences.append(
            f"{count(counts['diverged'], 'run')} diverged and "
            f"{'is' if counts['diverged'] == 1 else 'are'} in no mean and no interval."
        )
    if counts.get("failed"):
        sentences.append(
            f"{count(counts['failed'], 'run')} failed; the table of runs has the reasons."
        )
    sentences += about_metrics(arms)
    sentences += _of_seeds(outcomes)
    sentences += [line for arm in arms if (line := _dead(arm))]
    skipped = [n for run in runs if (n := (run.summary or {}).get("skipped_steps"))]
    if skipped:
        sentences.append(
            f"{count(len(skipped), 'run')} skipped {count(sum(skipped), 'step')}, because scaled "
            "gradients were not finite."
        )
    for kind in ABOUT_CONTROLS:
        several = sum(kind in run.controls and run.controls[kind] != run.control for run in runs)
        if several:
            name = kind.replace("_", "-")
            sentences.append(
                f"{count(several, 'run')} with a {name} control too, here compared with the "
                f"plain one alone; control={kind} given again tells the other."
            )
    sentences += about_controls(outcomes)
    return sentences


def about_metrics(arms: Sequence[Arm]) -> list[str]:
    """Return a caution if the chosen metric is in no run, or if runs were planned with several."""
    chosen, known = chosen_metrics(arms), metrics_of(arms)
    sentences = []
    if chosen and known and chosen[0] not in known:
        sentences.append(
            f"metric={chosen[0]}: no finished run has it; there are {', '.join(known)}."
        )
    if len(chosen) > 1:
        sentences.append(
            f"Runs were planned with metric={listed(chosen)}; the verdict is about the first."
        )
    return sentences


def _of_seeds(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the cautions on few seeds and on many compared arms."""
    sentences = []
    if line := repeats_line(outcomes):
        sentences.append(line)
    numbers = [one.difference.n for one in outcomes if one.difference and not one.repeats]
    if numbers and min(numbers) < MIN_FOR_P:
        sentences.append(FEW)
    compared = len({outcome.arm.name for outcome in outcomes if outcome.difference})
    if compared > 1 and (least := seeds_needed(compared)) > min(numbers, default=least):
        sentences.append(
            f"With {compared} arms the q of an arm can reach {MAX_P} from {least} seeds per arm on."
        )
    if compared > 1:
        controlled = any(outcome.q_value is not None for outcome in outcomes)
        chance = "of 20 arms without any effect one is expected to look clear by its p"
        more = "; q corrects for that" if controlled else ""
        sentences.append(f"{compared} arms are compared at once: {chance}{more}.")
    return sentences


def _dead(arm: Arm) -> str:
    return dead_line(arm.name, [run.summary for run in arm.whole if run.summary])


def _nothing_yet(arms: Sequence[Arm], lost: Sequence[str]) -> str:
    whole = sum(len(arm.whole) for arm in arms)
    total = sum(len(arm.runs) for arm in arms)
    if not lost:
        return f"There is no treated arm to compare: {whole} of {total} plain runs have finished."
    if not any(run.control for arm in arms for run in arm.runs):
        finished = f"{whole} of {count(total, 'run')} finished"
        return (
            f"There is no control to compare with: {finished}, and what they came to stands alone."
        )
    if all(run.state in ENDED for arm in arms for run in arm.runs):
        return NO_PAIR
    return (
        f"Nothing can be compared yet: {whole} of {count(total, 'run')} finished, and no seed "
        "has both a treated and a control run."
    )


def _of_many(compared: Sequence[Outcome], headline: str) -> list[str]:
    name = title(headline)
    sentences = [f"{_capital(name)} is {part}." for part in _words(compared, CLEAR)]
    for few in (True, False):
        hints = _words([o for o in compared if _is_few(o) is few], HINTS)
        if hints:
            sentences.append(
                f"{_why_hints(compared, few)}: take as hints that {name} is {listed(hints)}."
            )
    unclear = [f"{o.arm.name} ({_number_of(o)})" for o in compared if o.reading == UNCLEAR]
    if unclear:
        sentences.append(f"No clear difference in {name} for {listed(unclear)}.")
    same = [f"{o.arm.name} ({_number_of(o)})" for o in compared if o.reading == "identical"]
    if same:
        sentences.append(f"{_capital(name)} is identical to the control's with {listed(same)}.")
    for n, words in ((1, "One seed"), (2, "Two seeds")):
        parts = [
            f"{amount(headline, o.difference.mean)} with {o.arm.name}"
            for o in compared
            if o.difference and o.difference.n == n and o.reading != "identical"
        ]
        if parts:
            sentences.append(f"{words} each and so no interval: {name} {listed(parts)}.")
    rest = f"{sentences[0][0].lower()}{sentences[0][1:]}"
    sentences[0] = f"Compared with their control arms, seed by seed: {rest}"
    sentences += _disagreements(compared)
    return sentences


def _disagreements(compared: Sequence[Outcome]) -> list[str]:
    """Return why median, mean and exact test of an arm disagree, a sentence for each such arm.

    The arm is named if there are several; of many the first three are told.
    """
    found = [
        f"{one.arm.name}: {text[:1].lower()}{text[1:]}" if len(compared) > 1 else text
        for one in compared
        if one.difference and (text := disagreement(one.metric, one.difference, one.reading))
    ]
    more = [f"The same kind of disagreement in {len(found) - 3} more arms."]
    return [*found[:3], *more] if len(found) > 4 else found


def _words(outcomes: Sequence[Outcome], readings: Sequence[str]) -> list[str]:
    """`higher with clip (..)`, for each word that is some outcome's reading; the largest difference
    first."""
    phrases = []
    for word, reading in zip(CLEAR, readings, strict=True):
        matching = [o for o in outcomes if o.reading == reading]
        matching.sort(key=lambda o: -abs(o.difference.mean if o.difference else 0))
        texts = [f"{o.arm.name} ({_sizes_in_brackets(o)})" for o in matching]
        if matching:
            phrases.append(f"{word} with {listed(texts, 4)}")
    return phrases


def _is_few(outcome: Outcome) -> bool:
    return outcome.difference is not None and outcome.difference.n < MIN_FOR_P


def _why_hints(compared: Sequence[Outcome], few: bool) -> str:
    if not few:
        return f"With p or q above {MAX_P}"
    sizes = sorted({o.difference.n for o in compared if o.difference and o.reading in HINTS})
    sizes = [n for n in sizes if n < MIN_FOR_P]
    number = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    return f"With n = {number} seeds no sign-flip test can reach 0.05"


def _sizes_in_brackets(outcome: Outcome) -> str:
    """Return `8 of 8 seeds; median +2.56 pp, 95 % interval +1.78 to ...; mean +3.37 pp, ...`.

    The seeds are those with the sign of the reading; without a direction both signs are counted.
    """
    difference, key = outcome.difference, outcome.metric
    assert difference is not None
    word = outcome.reading.partition(" ")[0]
    if word in CLEAR:
        seeds = f"{getattr(difference, word)} of {count(difference.n, 'seed')}"
    else:
        counts = f"higher in {difference.higher}, lower in {difference.lower}"
        seeds = f"{counts} of {count(difference.n, 'seed')}"
    return f"{seeds}; {sizes(key, difference, in_brackets=True)}"


def _number_of(outcome: Outcome) -> str:
    return f"n = {outcome.difference.n}" if outcome.difference else "n = 0"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


ABOUT = "Outcomes are of the step at which each run has ended."


def reached(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence for each arm with a stopping condition: how many seeds reached it, and at
    which steps; then whether sooner than the control.

    The last sentence says at which step outcomes are taken.
    """
    sentences = []
    for arm in arms:
        asked = [run for run in arm.runs if UNTIL_REACHED in (run.summary or {})]
        if not asked:
            continue
        steps = sorted(int(step) for run in asked if (step := step_reached(run)) is not None)
        shown = ", ".join(map(str, steps))
        at = f", at step{'s' if len(steps) > 1 else ''} {shown}" if steps else ""
        until = (asked[0].summary or {})[UNTIL]
        sentences.append(f"{arm.name}: {len(steps)} of {len(asked)} seeds reached {until}{at}.")
    if not sentences:
        return []
    return [*sentences, *map(_beside, times_to_target(arms)), ABOUT]


def _beside(time: TimeToTarget) -> str:
    """Return how many seeds of an arm reached the condition sooner than in its control."""
    n = len(time.steps)
    p = f"exact sign test p {p_text(time.p_value)}"
    q = f", q {p_text(time.q_value)}" if time.q_value is not None else ""
    sentences = [
        f"{time.arm.name} got there sooner than the {time.plain} arm in {time.sooner} of "
        f"{count(n, 'seed')}, later in {time.later}; a seed that never did counts as latest; "
        f"{p}{q}."
    ]
    if both := time.both:
        ends = f" ({min(both):+,g} to {max(both):+,g})" if len(both) > 1 else ""
        sentences.append(
            f"Difference in steps where both did, {count(len(both), 'seed')}: median "
            f"{median(both):+,g}{ends}."
        )
    if time.states:
        left = [f"{count(number, 'seed')} {state}" for state, number in time.states.items()]
        sentences.append(f"Left out: {listed(left)}.")
    return " ".join(sentences)


def dead_line(name: str, summaries: Sequence[Summary]) -> str:
    """Return a sentence on the ended runs of an arm; empty if each has learned something."""
    whole = [summary for summary in summaries if summary["state"] == "finished"]
    dead = [summary for summary in whole if summary.get("learned_nothing")]
    if not dead:
        return ""
    evidence = dead[0]["learned_nothing"]
    key = evidence["metric"]
    reached = fmean(summary[key] for summary in dead)
    beside = fmean(summary["learned_nothing"]["beside"] for summary in dead)
    return (
        f"{name}: training did not learn anything in {len(dead)} of {len(whole)} seeds: "
        f"{title(key)} {value(key, reached)}, and {evidence['what']} {value(key, beside)}."
    )


def spread(key: str, values: Sequence[float]) -> str:
    """The mean, and from where to where if there are more than one: `78.67% (76.00% to 80.00%)`."""
    ends = f" ({value(key, min(values))} to {value(key, max(values))})"
    return f"{value(key, fmean(values))}{ends if len(values) > 1 else ''}"


def uncompared(arms: Sequence[Arm], outcomes: Sequence[Outcome]) -> list[Arm]:
    """Arms with finished runs and no difference; a control only if nothing is compared at all."""
    compared = {outcome.arm.name for outcome in outcomes if outcome.difference}
    return [
        arm
        for arm in arms
        if arm.whole and arm.name not in compared and not (arm.is_control and compared)
    ]


def alone_rows(arms: Sequence[Arm], metrics: Sequence[str]) -> list[list[str]]:
    """Return a row for each arm: name, number of finished runs, spread of each metric."""
    rows = []
    for arm in arms:
        row = [arm.name, str(len(arm.whole))]
        for key in metrics:
            values = [run.summary[key] for run in arm.whole if run.summary and key in run.summary]
            row.append(spread(key, values) if values else "-")
        rows.append(row)
    return rows


def effort(runs: Sequence[LoadedRun]) -> list[str]:
    """Training time and hardware, a sentence each, with how many runs they are of."""
    ended = [run.summary for run in runs if run.summary]
    times = [summary["time/train_s"] for summary in ended if summary.get("time/train_s")]
    sentences = []
    if times:
        of = count(len(times), "run") if len(times) == len(runs) else _of(len(times), len(runs))
        sentences.append(f"Trained for {duration(sum(times))} in all ({of}).")
    places = Counter(str(summary["hardware"]) for summary in ended if summary.get("hardware"))
    if len(places) == 1:
        sentences.append(f"Hardware: {next(iter(places))}.")
    elif places:
        shown = [f"{place} ({count(number, 'run')})" for place, number in places.most_common()]
        sentences.append(f"Hardware: {'; '.join(shown)}.")
    return sentences


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _of(number: int, runs: int) -> str:
    return f"{number} of {count(runs, 'run')}"


def _ends(key: str, ends: tuple[float, float] | None) -> str:
    return amounts(key, *ends) if ends else ""


SHARED = {"treated": "with it", "control": "without it", "difference": "share"}
"""Heads of the columns of a table of links' shares."""


def outcome_table(
    outcomes: Sequence[Outcome],
    called: Mapping[str, str] = MappingProxyType({}),
    without: Sequence[str] = (),
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table of outcomes; columns that are empty in all rows are left out."""
    columns: dict[str, Callable[[Outcome], str]] = {
        "arm": lambda o: o.arm.name,
        "link": lambda o: o.link,
        "metric": lambda o: title(o.metric) if o.metric else "",
        "difference": lambda o: amount(o.metric, o.difference.mean) if o.difference else "",
        "95 % interval": lambda o: interval(o.metric, o.difference) if o.difference else "",
        "reading": lambda o: (
            "nothing to compare"
            if not o.reading
            else ""
            if "no interval" in o.reading
            else o.reading
        ),
        "n": lambda o: f"{o.difference.n if o.difference else 0} of {o.planned}",
        "treated": lambda o: value(o.metric, sum(o.treated) / len(o.treated)) if o.seeds else "",
        "control": lambda o: value(o.metric, sum(o.control) / len(o.control)) if o.seeds else "",
        "higher": lambda o: f"{o.difference.higher}/{o.difference.n}" if o.difference else "",
        "p": lambda o: p_text(o.p_value),
        "q": lambda o: p_text(o.q_value),
        "median": lambda o: amount(o.metric, o.difference.median) if o.difference else "",
        "median's interval": lambda o: _ends(
            o.metric, o.difference.median_interval if o.difference else None
        ),
        "BCa bootstrap": lambda o: _ends(o.metric, o.bootstrap),
        "not compared": lambda o: ", ".join(f"{n} {state}" for state, n in o.states.items()),
    }
    shown = {
        head: texts
        for head, tell in columns.items()
        if head not in without and any(texts := [tell(outcome) for outcome in outcomes])
    }
    rows = [[texts[place] for texts in shown.values()] for place in range(len(outcomes))]
    return [called.get(head, head) for head in shown], rows
