"""Runs that have learned nothing: beside such a run a difference says little."""

from collections.abc import Sequence
from statistics import fmean

from gradsurg.report.wording import Summary, title, value


def dead_line(name: str, summaries: Sequence[Summary]) -> str:
    """One sentence on the runs of an arm that have ended; empty if each has learned something."""
    whole = [summary for summary in summaries if summary["state"] == "finished"]
    dead = [summary for summary in whole if summary.get("learned_nothing")]
    if not dead:
        return ""
    found = dead[0]["learned_nothing"]
    key = found["metric"]
    reached = fmean(summary[key] for summary in dead)
    beside = fmean(summary["learned_nothing"]["beside"] for summary in dead)
    return (
        f"{name}: training did not learn anything in {len(dead)} of {len(whole)} seeds: "
        f"{title(key)} {value(key, reached)}, and {found['what']} {value(key, beside)}."
    )
