"""The answer, in one paragraph, and what to be careful about."""

from collections import Counter
from collections.abc import Sequence

from gradsurg.report.certainty import CLEAR, MAX_Q, MIN_FOR_P
from gradsurg.report.dead import dead_line
from gradsurg.report.grouping import Arm
from gradsurg.report.outcomes import Outcome, repeats_line
from gradsurg.report.reached import reached
from gradsurg.report.reading import STATES, Found
from gradsurg.report.wording import FEW, amount, answer, count, interval, listed, title


def states(runs: Sequence[Found]) -> dict[str, int]:
    """How many runs there are in each state."""
    counts = Counter(run.state for run in runs)
    return {state: counts[state] for state in STATES if counts[state]}


def paragraph(outcomes: Sequence[Outcome], arms: Sequence[Arm]) -> str:
    """What the study says of its headline metric, arm by arm."""
    headline = outcomes[0].metric if outcomes else ""
    own = [outcome for outcome in outcomes if outcome.metric == headline]
    compared = [outcome for outcome in own if outcome.difference]
    lost = [outcome.arm.name for outcome in own if not outcome.difference]
    ended = reached(arms)
    if not compared:
        return " ".join([*ended, _nothing_yet(arms, lost)])
    one = compared[0]
    if len(compared) == 1 and one.difference:
        said = [*ended, answer(one.arm.name, one.plain, headline, one.difference)]
    else:
        said = [*ended, *_of_many(compared, headline)]
    if lost:
        said.append(f"Nothing to compare yet for {listed(lost)}.")
    return " ".join(said)


def cautions(
    runs: Sequence[Found], outcomes: Sequence[Outcome], arms: Sequence[Arm] = ()
) -> list[str]:
    """What a reader should keep in mind, one sentence a thing."""
    counts = states(runs)
    said = []
    ended = {"finished", "diverged", "failed"}
    open_runs = sum(number for state, number in counts.items() if state not in ended)
    if open_runs:
        parts = [f"{number} {state}" for state, number in counts.items() if state not in ended]
        said.append(
            f"The study is unfinished: {', '.join(parts)} of {count(len(runs), 'run')}. "
            "Numbers cover what is there."
        )
    if counts.get("diverged"):
        said.append(
            f"{count(counts['diverged'], 'run')} diverged and "
            f"{'is' if counts['diverged'] == 1 else 'are'} in no mean and no interval."
        )
    if counts.get("failed"):
        said.append(f"{count(counts['failed'], 'run')} failed; the table of runs has the reasons.")
    said += _of_seeds(outcomes)
    said += [line for arm in arms if (line := _dead(arm))]
    skipped = [n for run in runs if (n := (run.summary or {}).get("skipped_steps"))]
    if skipped:
        said.append(
            f"{count(len(skipped), 'run')} skipped {count(sum(skipped), 'step')}, because scaled "
            "gradients were not finite."
        )
    several = sum(len(run.controls) > 1 for run in runs)
    if several:
        said.append(
            f"{count(several, 'run')} with a norm-matched control too, here compared with the "
            "plain one alone; control=norm_matched given again tells the other."
        )
    untold = sum(not run.told for run in runs)
    if untold:
        said.append(
            f"{count(untold, 'directory', 'directories')} without a run.json: paired with "
            "controls by their configs."
        )
    return said


def _of_seeds(outcomes: Sequence[Outcome]) -> list[str]:
    """How much may be said of so many seeds, and of so many arms."""
    said = []
    if line := repeats_line(outcomes):
        said.append(line)
    numbers = [one.difference.n for one in outcomes if one.difference and not one.repeats]
    if numbers and min(numbers) < 6:
        said.append(FEW)
    compared = len({outcome.arm.name for outcome in outcomes if outcome.difference})
    if compared > 1:
        controlled = any(outcome.q_value is not None for outcome in outcomes)
        chance = "of 20 that do nothing one is expected to look clear"
        more = "; q allows for that" if controlled else ""
        said.append(f"{compared} arms are compared at once: {chance}{more}.")
    return said


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
    return (
        f"Nothing can be compared yet: {whole} of {count(total, 'run')} finished, and no seed "
        "has both a treated and a control run."
    )


def _of_many(compared: Sequence[Outcome], headline: str) -> list[str]:
    name = title(headline)
    clear = _words(compared, "{}")
    said = [f"{_capital(name)} is {part}." for part in clear]
    for few in (True, False):
        hints = _words([o for o in compared if _is_few(o) is few], "{} (hint)")
        if hints:
            said.append(
                f"{_why_hints(compared, few)}: take as hints that {name} is {listed(hints)}."
            )
    unclear = [o for o in compared if o.reading not in (*CLEAR, *(f"{w} (hint)" for w in CLEAR))]
    alone = [o for o in unclear if o.difference and o.difference.low is None]
    several = [o for o in unclear if o not in alone]
    if several:
        parts = [f"{o.arm.name} ({_number_of(o)})" for o in several]
        said.append(f"No clear difference in {name} for {listed(parts)}.")
    if alone:
        parts = [
            f"{amount(headline, o.difference.mean)} with {o.arm.name}"
            for o in alone
            if o.difference
        ]
        said.append(f"One seed each and so no interval: {name} {listed(parts)}.")
    said[0] = f"Beside their control arms, seed for seed: {said[0][0].lower()}{said[0][1:]}"
    said.append("Brackets: mean difference, 95 % paired t interval, number of seeds.")
    return said


def _words(outcomes: Sequence[Outcome], reading: str) -> list[str]:
    """`higher with clip (..)`, for each word whose reading some have; the largest first."""
    said = []
    for word in CLEAR:
        own = [o for o in outcomes if o.reading == reading.format(word)]
        own.sort(key=lambda o: -abs(o.difference.mean if o.difference else 0))
        if own:
            said.append(f"{word} with {listed([_told(outcome) for outcome in own], 4)}")
    return said


def _is_few(outcome: Outcome) -> bool:
    return outcome.difference is not None and outcome.difference.n < MIN_FOR_P


def _why_hints(compared: Sequence[Outcome], few: bool) -> str:
    if not few:
        return f"With an interval that leaves out 0, but q above {MAX_Q}"
    own = sorted({o.difference.n for o in compared if o.difference and "hint" in o.reading})
    own = [n for n in own if n < MIN_FOR_P]
    number = f"{own[0]} to {own[-1]}" if len(own) > 1 else f"{own[0]}"
    return f"With n = {number} seeds no sign-flip test can reach .05"


def _told(outcome: Outcome) -> str:
    found = outcome.difference
    assert found is not None
    much = amount(outcome.metric, found.mean)
    return f"{outcome.arm.name} ({much}; {interval(outcome.metric, found)}; {_number_of(outcome)})"


def _number_of(outcome: Outcome) -> str:
    return f"n = {outcome.difference.n}" if outcome.difference else "n = 0"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
