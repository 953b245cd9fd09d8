"""Which runs have reached what they were trained until, and when."""

from collections.abc import Sequence

from gradsurg.report.grouping import Arm
from gradsurg.runs.until import REACHED, STEP, UNTIL

ABOUT = "Outcomes are of the step at which each run has ended."


def reached(arms: Sequence[Arm]) -> list[str]:
    """A sentence for each arm that was trained until something: how many seeds, at which steps.

    Another one says what that makes of the outcomes.
    """
    said = []
    for arm in arms:
        asked = [run.summary for run in arm.whole if run.summary and REACHED in run.summary]
        if not asked:
            continue
        steps = sorted(summary[STEP] for summary in asked if summary[REACHED])
        listed = ", ".join(str(step) for step in steps)
        at = f", at step{'s' if len(steps) > 1 else ''} {listed}" if steps else ""
        said.append(
            f"{arm.name}: {len(steps)} of {len(asked)} seeds reached {asked[0][UNTIL]}{at}."
        )
    return [*said, ABOUT] if said else []
