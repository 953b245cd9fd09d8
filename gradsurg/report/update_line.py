"""The update effect of an arm, in one sentence."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gradsurg.tables import number

Summary = Mapping[str, Any]  # Any: what JSON can hold


def update_line(summaries: Sequence[Summary]) -> str:
    """What became of the updates, over the runs that were asked; nothing if none was."""
    asked = [summary for summary in summaries if summary.get("update/sampled")]
    if not asked:
        return ""
    shown = {
        name: _mean(asked, f"update/{name}")
        for name in ("cosine", "norm_ratio", "loss_change", "loss_change_without")
    }
    steps = sum(summary["update/sampled"] for summary in asked)
    runs = f"{len(asked)} run{'s' if len(asked) > 1 else ''}"
    return (
        f"Updates ({steps} steps of {runs}), beside those without the surgery: cosine "
        f"{shown['cosine']}, norm ratio {shown['norm_ratio']}; a step changes the loss of its "
        f"batch by {shown['loss_change']}, without the surgery by {shown['loss_change_without']}."
    )


def _mean(summaries: Sequence[Summary], key: str) -> str:
    """An update of zero has no cosine."""
    known = [summary[key] for summary in summaries if summary.get(key) is not None]
    return number(fmean(known)) if known else "-"
