"""What a job prints when it is done: the answer first, then the effect at each site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from textwrap import fill

from gradsurg.effects.tables import aligned
from gradsurg.effects.tables import effect_table as effect_text
from gradsurg.report import outcomes
from gradsurg.report.alone import spread
from gradsurg.report.attribution import shares_text
from gradsurg.report.certainty import about_p, bootstrap_line, p_text
from gradsurg.report.conflict_text import conflict_text
from gradsurg.report.dead import dead_line
from gradsurg.report.grouping import Arm
from gradsurg.report.outcomes import Cost, Outcome
from gradsurg.report.reached import reached
from gradsurg.report.reading import Found
from gradsurg.report.update_line import update_line
from gradsurg.report.wording import (
    HEADLINE,
    Summary,
    amount,
    answer,
    count,
    interval,
    titles,
    value,
)
from gradsurg.stats import Difference
from gradsurg.training.frames import effect_table
from gradsurg.training.run_directory import RunDirectory

WIDTH = 100


@dataclass(frozen=True)
class Runs:
    """The run directories of one seed; one of them can be missing.

    `without` are those of the chain without a link.
    """

    treated: Path | None
    control: Path | None
    without: Mapping[str, Path | None] = field(default_factory=dict)


def report(runs: Sequence[Runs]) -> str:
    """The outcome of all seeds, treated beside control, and the effect at each site."""
    treated = [_summary(run.treated) for run in runs]
    control = [_summary(run.control) for run in runs]
    paths = [run.treated for run in runs if run.treated]
    shown = paths or [run.control for run in runs if run.control]
    parts = [
        _reached(runs),
        _outcome(runs),
        _dead(treated, control),
        _shares(runs, treated),
        _wrapped(update_line([summary for summary in treated if summary is not None])),
        _notes([summary for summary in treated + control if summary is not None]),
        conflicts := _conflicts(runs),
        _effects(shown, bool(conflicts)),
        _places(runs),
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(path: Path | None) -> Summary | None:
    """What a run came to; None too if another command with force=true has just cleared it."""
    place = RunDirectory(path) if path is not None else None
    return place.read_summary() if place is not None and place.finished else None


def _outcome(runs: Sequence[Runs]) -> str:
    pairs = [pair for run in runs if (pair := _pair(run))]
    if not pairs:
        alone = [_summary(path) for run in runs for path in (run.treated, run.control)]
        return _alone([summary for summary in alone if summary])
    treated, control = (_arm([pair[side] for pair in pairs]) for side in (0, 1))
    lost = [
        f"{number} of {len(pairs)} {arm.name} runs diverged"
        for arm in (treated, control)
        if (number := sum(run.state == "diverged" for run in arm.runs))
    ]
    compared = outcomes.compare([treated, control])
    found = {one.metric: (one, one.difference) for one in compared if one.difference}
    if not found:
        return fill(f"{treated.name}: nothing to compare; {'; '.join(lost)}", WIDTH)
    shown = {key: text for key, text in titles(_first(treated)).items() if key in found}
    rows = [["", treated.name, control.name, "difference", "95 % interval", "sign-flip p"]]
    rows += [_row(key, text, *found[key]) for key, text in shown.items()]
    costs = outcomes.costs([treated, control])
    rows.append([*_time_row(costs), ""])
    headline = next(key for key in HEADLINE if key in found)
    difference = found[headline][1]
    said = fill(answer(treated.name, control.name, headline, difference), WIDTH)
    few = "" if "sign-flip" in said else about_p(difference.n)
    by_seed = {key: found[key][0].differences for key in shown}
    bootstrap = fill(bootstrap_line(by_seed, amount), WIDTH)
    notes = [note for note in (few, bootstrap, _measured(costs, treated)) if note]
    same = fill(outcomes.repeats_line(compared), WIDTH)
    return "\n".join([said, *lost, *([same] if same else []), "", aligned(rows), *notes])


def _pair(runs: Runs) -> tuple[Found, Found] | None:
    """The two of a seed as the report of a study knows them; None if one has not ended."""
    treated, control = _summary(runs.treated), _summary(runs.control)
    if treated is None or control is None or runs.treated is None or runs.control is None:
        return None
    beside = _found(runs.control, control, "control")
    return replace(_found(runs.treated, treated, "treated"), control=beside.name), beside


def _found(path: Path, summary: Summary, arm: str) -> Found:
    return Found(path, summary["state"], arm=arm, label=summary["label"], summary=summary)


def _arm(runs: Sequence[Found]) -> Arm:
    name = runs[0].label
    if runs[0].arm == "control":
        name = "control" if name == "none" else "norm-matched"
    return Arm(name, tuple(runs), {})


def _reached(runs: Sequence[Runs]) -> str:
    """Which seeds have reached what they were trained until."""
    arms: list[Arm] = []
    for arm in ("treated", "control"):
        found = []
        for run in runs:
            path, beside = getattr(run, arm), run.control if arm == "treated" else None
            if path and (said := _summary(path)):
                found.append(replace(_found(path, said, arm), control=beside and beside.name))
        arms += [_arm(found)] if found else []
    return "\n".join(_wrapped(line) for line in reached(arms))


def _first(arm: Arm) -> Summary:
    return next(run.summary for run in arm.whole if run.summary)


def _dead(treated: Sequence[Summary | None], control: Sequence[Summary | None]) -> str:
    """Which arm has learned nothing, if one has."""
    arms = [[summary for summary in arm if summary] for arm in (treated, control)]
    lines = [dead_line(_called(arm[0]), arm) for arm in arms if arm]
    return "\n".join(_wrapped(line) for line in lines if line)


def _called(summary: Summary) -> str:
    return "control" if summary["label"] == "none" else summary["label"]


def _shares(runs: Sequence[Runs], treated: Sequence[Summary | None]) -> str:
    """What each link of a chain adds to the headline outcome, where it was left out."""
    key = next((key for key in HEADLINE for summary in treated if summary and key in summary), "")
    whole = [_finished(summary, key) for summary in treated]
    links = {
        link: (whole, [_finished(_summary(run.without.get(link)), key) for run in runs])
        for link in dict.fromkeys(link for run in runs for link in run.without)
    }
    return shares_text(key, links) if links and key else ""


def _finished(summary: Summary | None, key: str) -> float | None:
    return summary.get(key) if summary and summary["state"] == "finished" else None


def _row(key: str, title: str, outcome: Outcome, found: Difference) -> list[str]:
    means = [value(key, fmean(values)) for values in (outcome.treated, outcome.control)]
    shown = [*means, amount(key, found.mean), interval(key, found)]
    return [title, *shown, p_text(outcome.p_value)]


def _time_row(costs: Sequence[Cost]) -> list[str]:
    """Step times; a run that was resumed after its last step has none."""
    if not costs:
        return ["step time", "-", "-", "-", ""]
    (cost,) = costs
    ratios = cost.ratios
    times = [f"{cost.treated_ms:.3g} ms", f"{cost.control_ms:.3g} ms"]
    spread = f"{min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%} (range)" if len(ratios) > 1 else ""
    return ["step time", *times, f"{median(ratios) - 1:+.0%}", spread]


def _measured(costs: Sequence[Cost], arm: Arm) -> str:
    if not costs or costs[0].measured_ms is None:
        return ""
    every = _first(arm)["effects_every"]
    return fill(
        "step time is the median of steps whose effect is not measured, the difference that of the "
        f"pairs; a step whose effect is measured (one in {every}) takes "
        f"{costs[0].measured_ms:.3g} ms with {arm.name}",
        WIDTH,
    )


def _alone(summaries: Sequence[Summary]) -> str:
    """Runs with nothing to compare them with."""
    whole = [summary for summary in summaries if summary["state"] == "finished"]
    name = summaries[0]["label"]
    title = "plain run, no surgery" if name == "none" else f"{name}, no control"
    lines = [f"{title}: {count(len(summaries), 'seed')}"]
    if len(whole) < len(summaries):
        lines.append(f"{len(summaries) - len(whole)} of {len(summaries)} runs diverged")
    for key, text in titles(whole[0] if whole else {}).items():
        values = [summary[key] for summary in whole if key in summary]
        if values:
            lines.append(f"  {text}: {spread(key, values)}")
    return "\n".join(lines)


def _conflicts(runs: Sequence[Runs]) -> str:
    """Between the gradients of several tasks, with the surgery and without."""
    arms = []
    for paths in ([run.treated for run in runs], [run.control for run in runs]):
        own = [path for path in paths if path is not None]
        summary = next((found for path in own if (found := _summary(path))), None)
        if summary:
            arms.append(("control" if summary["label"] == "none" else summary["label"], own))
    return conflict_text(arms)


def _effects(paths: Sequence[Path], several: bool) -> str:
    """At each site; an aggregator of `several` tasks has effects only if there is a transform."""
    rows, examined = effect_table(paths), effect_table(paths, examined=True)
    if not rows and not examined:
        if several or all(_without_transform(path) for path in paths):
            return "" if several else "No conflict was measured: effects_every=0."
        return "No effect was measured: effects_every=0, or the transform never acted."
    means = f"means over {count(len(paths), 'run')}"
    parts = []
    if not examined or any(row["calls"] for row in rows):
        every = {(_summary(path) or {}).get("effects_every", 1) for path in paths}
        when = f" at one step in {every.pop()}" if len(every) == 1 and every != {1} else ""
        parts.append(f"Gradients at each site, {means}{when}:\n\n{_effect_text(rows)}")
    if examined:
        training = "acted on no gradient in" if rows else "was not measured in"
        only = f" (the surgery {training} the training)" if not parts else ""
        head = f"Gradients at each site in the examination after the training, {means}{only}:"
        parts.append(f"{fill(head, WIDTH)}\n\n{_effect_text(examined)}")
    return "\n\n".join(parts)


def _effect_text(rows: list[dict[str, object]]) -> str:
    for row in rows:
        if row["transform"] == "none":
            row["norm_after"] = None  # what it was before: nothing was done
    ranks = {transform: rank for rank, transform in enumerate(_in_order(rows))}
    rows.sort(key=lambda row: ranks[row["transform"]])
    return effect_text(rows)


def _without_transform(path: Path) -> bool:
    """Whether an aggregator is all the surgery that there was."""
    config = RunDirectory(path).read_config() or {}
    return bool(config.get("aggregator")) and not config.get("transform")


def _in_order(rows: Sequence[dict[str, object]]) -> list[object]:
    return list(dict.fromkeys(row["transform"] for row in rows))


def _notes(summaries: Sequence[Summary]) -> str:
    """Each kind of note once, with the wording of its first run: they differ in numbers only."""
    kinds: dict[str, list[str]] = {}
    for summary in summaries:
        for note in summary.get("notes", []):
            kinds.setdefault(note.partition(". ")[0], []).append(note)
    lines = [f"Note ({count(len(own), 'run')}): {own[0]}" for own in kinds.values()]
    return "\n".join(_wrapped(line) for line in lines)


def _places(runs: Sequence[Runs]) -> str:
    paths = [path for run in runs for path in _paths(run)]
    folder = paths[0].parent
    names = " ".join(dict.fromkeys(path.name for path in sorted(paths)))
    return _wrapped(f"{count(len(paths), 'run')} in {folder}: {names}")


def _paths(run: Runs) -> list[Path]:
    paths = [run.treated, run.control, *run.without.values()]
    return [path for path in paths if path is not None]


def _wrapped(line: str) -> str:
    """Names stay whole, so that they can be copied."""
    return fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
