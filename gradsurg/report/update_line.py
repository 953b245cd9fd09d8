"""The update effect of an arm, in numbers and in one sentence."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gradsurg.effects.numbers import UPDATE_NUMBERS, UPDATES_SAMPLED
from gradsurg.effects.tables import number

Summary = Mapping[str, Any]  # Any: what JSON can hold

NUMBERS = {number.name: number.label for number in UPDATE_NUMBERS}

ABOUT = (
    "The update that was made beside the one there would have been without the surgery, from the "
    "same weights and the same batch; loss change is what a step does to the loss of its batch."
)


def asked(summaries: Sequence[Summary]) -> list[Summary]:
    """Those of runs whose updates were looked at."""
    return [summary for summary in summaries if summary.get(UPDATES_SAMPLED)]


def known(summaries: Sequence[Summary], key: str) -> list[float]:
    """One of the numbers, run by run; an update of zero has no cosine."""
    found = [summary.get(key) for summary in summaries]
    return [float(value) for value in found if value is not None]


def update_line(summaries: Sequence[Summary]) -> str:
    """What became of the updates, over the runs that were asked; nothing if none was."""
    own = asked(summaries)
    if not own:
        return ""
    cosine, norm_ratio, change, without = (_mean(own, key) for key in NUMBERS)
    return (
        f"Updates ({of_how_much(own)}), beside those without the surgery: cosine {cosine}, norm "
        f"ratio {norm_ratio}; a step changes the loss of its batch by {change}, without the "
        f"surgery by {without}."
    )


def of_how_much(summaries: Sequence[Summary]) -> str:
    """`60 steps of 3 runs`."""
    steps = sum(summary[UPDATES_SAMPLED] for summary in summaries)
    runs = f"{len(summaries)} run{'s' if len(summaries) > 1 else ''}"
    return f"{steps} step{'s' if steps > 1 else ''} of {runs}"


def _mean(summaries: Sequence[Summary], key: str) -> str:
    values = known(summaries, key)
    return number(fmean(values)) if values else "-"
