"""Which runs have reached what they were trained until, and when."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gradsurg.report.certainty import p_text
from gradsurg.report.grouping import Arm
from gradsurg.report.outcomes import Outcome, beside_control
from gradsurg.report.reading import Found
from gradsurg.report.wording import Summary, answer, count, listed
from gradsurg.training.until import REACHED, STEP, UNTIL

ABOUT = "Outcomes are of the step at which each run has ended."


def reached(arms: Sequence[Arm]) -> list[str]:
    """A sentence for each arm that was trained until something: how many seeds, at which steps;
    then how many steps sooner or later than its control it got there.

    The last one says what that makes of the outcomes.
    """
    said = []
    for arm in arms:
        asked = _asked(arm)
        if not asked:
            continue
        steps = sorted(summary[STEP] for summary in asked if summary[REACHED])
        shown = ", ".join(str(step) for step in steps)
        at = f", at step{'s' if len(steps) > 1 else ''} {shown}" if steps else ""
        said.append(
            f"{arm.name}: {len(steps)} of {len(asked)} seeds reached {asked[0][UNTIL]}{at}."
        )
    if not said:
        return []
    runs = {run.name: run for arm in arms for run in arm.whole}
    compared = [_beside(one, runs) for one in beside_control(arms, STEP) if _asked(one.arm)]
    return [*said, *(line for line in compared if line), ABOUT]


def _asked(arm: Arm) -> list[Summary]:
    return [run.summary for run in arm.whole if run.summary and REACHED in run.summary]


def _beside(outcome: Outcome, runs: Mapping[str, Found]) -> str:
    """The steps of an arm minus those of its control, of the seeds that got there in both, and how
    many others there are; empty if nothing is beside it.
    """
    name, plain = outcome.arm.name, outcome.plain
    others: Counter[str] = Counter()
    for run in outcome.arm.whole:
        other = runs.get(run.control or "")
        if other is None or REACHED not in (other.summary or {}):
            continue
        plain = "control" if other.label == "none" else other.label.replace("_", "-")
        match _got_there(run), _got_there(other):
            case True, False:
                others[f"in {name} alone"] += 1
            case False, True:
                others[f"in the {plain} arm alone"] += 1
            case False, False:
                others["in neither arm"] += 1
    apart = [f"{count(number, 'seed')} got there {where}" for where, number in others.items()]
    if not apart and outcome.difference is None:
        return ""
    apart += [f"{count(number, 'seed')} {state}" for state, number in outcome.states.items()]
    if outcome.difference is None:
        return f"{name}: no seed got there in both arms: {listed(apart)}."
    q = f", q {p_text(outcome.q_value)}" if outcome.q_value is not None else ""
    p = f" Sign-flip p {p_text(outcome.p_value)}{q}." if outcome.p_value is not None else ""
    left = f" Left out: {listed(apart)}." if apart else ""
    return f"{answer(name, plain, STEP, outcome.difference)}{p}{left}"


def _got_there(run: Found) -> bool:
    return bool((run.summary or {})[REACHED])
