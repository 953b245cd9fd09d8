"""What arms came to that have nothing to be compared with."""

from collections.abc import Sequence
from statistics import fmean

from gradsurg.report.grouping import Arm
from gradsurg.report.outcomes import Outcome
from gradsurg.report.wording import value


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
    """Of each arm its name, the number of its finished runs, and the spread of each metric."""
    rows = []
    for arm in arms:
        row = [arm.name, str(len(arm.whole))]
        for key in metrics:
            values = [run.summary[key] for run in arm.whole if run.summary and key in run.summary]
            row.append(spread(key, values) if values else "-")
        rows.append(row)
    return rows
