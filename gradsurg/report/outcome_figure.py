"""The figure of outcomes: what each arm's pairs differ by, with intervals."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsurg.report.certainty import CLEAR
from gradsurg.report.outcomes import Outcome
from gradsurg.report.palette import TREATED, UNCLEAR
from gradsurg.report.panels import cut, per_cent
from gradsurg.report.study_report import StudyReport
from gradsurg.report.wording import title


def draw_outcome(report: StudyReport) -> Figure | None:
    """The forest plot, a panel for each metric; arms without a pair are named, with no mark."""
    if not any(outcome.difference for outcome in report.outcomes):
        return None
    shown = list(report.metrics)[:4]
    first = [outcome for outcome in report.outcomes if outcome.metric == shown[0]]
    figure = Figure(figsize=(2.2 + 2.4 * len(shown), 0.9 + 0.27 * len(first)))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, metric in zip(axes, shown, strict=True):
        own = [outcome for outcome in report.outcomes if outcome.metric == metric]
        panel.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        for row, outcome in enumerate(own):
            _mark(panel, outcome, row)
        panel.set_xlim(*_limits(own))
        for row, outcome in enumerate(own):
            _arrows(panel, outcome, row)
        per_cent(panel.xaxis, metric)
        panel.set_xlabel(f"difference in {title(metric)}")
        panel.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(first)), [_named(outcome) for outcome in first])
    axes[0].set_ylim(len(first) - 0.4, -0.6)
    figure.suptitle(
        "Treated minus control, mean and 95 % paired t interval", x=0.01, ha="left", fontsize=9
    )
    figure.tight_layout()
    return figure


def _mark(panel: Axes, outcome: Outcome, row: float) -> None:
    found = outcome.difference
    if found is None:
        return
    clear = outcome.reading in CLEAR
    colour = TREATED if clear else UNCLEAR
    if found.low is not None and found.high is not None:
        panel.plot([found.low, found.high], [row, row], color=colour, linewidth=1.6)
    face = colour if clear else "white"
    panel.plot([found.mean], [row], "o", color=colour, markerfacecolor=face, markersize=4.5)


def _limits(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Room for all means and seeds; an interval may take half as much again at each end."""
    found = [outcome.difference for outcome in outcomes if outcome.difference]
    seen = [0.0, *(value for outcome in outcomes for value in outcome.differences)]
    ends = [end for one in found for end in (one.low, one.high) if end is not None]
    room = (max(seen) - min(seen)) / 2
    low = max(min(seen) - room, min([*ends, *seen]))
    high = min(max(seen) + room, max([*ends, *seen]))
    pad = 0.04 * ((high - low) or 1)
    return low - pad, high + pad


def _arrows(panel: Axes, outcome: Outcome, row: float) -> None:
    """At the edge, where an interval goes on."""
    found, (left, right) = outcome.difference, panel.get_xlim()
    if found is None or found.low is None or found.high is None:
        return
    colour = TREATED if outcome.reading in CLEAR else UNCLEAR
    inset = 0.015 * (right - left)
    ends = ((found.low < left, left + inset, "<"), (found.high > right, right - inset, ">"))
    for goes_on, edge, sign in ends:
        if goes_on:
            panel.plot([edge], [row], sign, color=colour, markersize=5)


def _named(outcome: Outcome) -> str:
    number = outcome.difference.n if outcome.difference else 0
    of = "" if number == outcome.planned else f" of {outcome.planned}"
    return f"{cut(outcome.arm.name)}  (n = {number}{of})"
