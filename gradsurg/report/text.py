"""Text for the terminal: the report of a job, and the overview of a study."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from os.path import relpath
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsurg.effects.tables import aligned
from gradsurg.effects.tables import effect_table as effect_text
from gradsurg.plugins.messages import folded
from gradsurg.report.answer import (
    NO_PAIR,
    about_controls,
    about_metrics,
    alone_rows,
    dead_line,
    diverged,
    other_metrics,
    reached,
    spread,
    vacuous,
)
from gradsurg.report.compare import (
    PLAIN,
    Cost,
    Outcome,
    about_p,
    bootstrap_line,
    compare,
    costs,
    repeats_line,
    shares_text,
)
from gradsurg.report.conflicts import (
    SINGLE_NUMBERS,
    about_conflicts,
    conflict_rows,
    conflict_text,
    others_lines,
)
from gradsurg.report.load import Arm, LoadedRun, fault_of
from gradsurg.report.series import update_line
from gradsurg.report.study import StudyReport
from gradsurg.report.tuning import tuning_lines
from gradsurg.report.wording import (
    FEW,
    HEADLINE,
    Summary,
    amount,
    answer,
    count,
    filled,
    interval,
    p_text,
    prose_width,
    table_width,
    title,
    titles,
    unbroken,
    value,
)
from gradsurg.stats import UNCLEAR, Difference
from gradsurg.training.frames import effect_table
from gradsurg.training.run_directory import ERROR, RunDirectory


@dataclass(frozen=True)
class Runs:
    """The run directories of one seed; one of them can be missing.

    `without` are the directories of the chain without a link.
    """

    treated: Path | None
    control: Path | None
    without: Mapping[str, Path | None] = field(default_factory=dict)


def report(runs: Sequence[Runs]) -> str:
    """Return the outcomes of treated and control runs over all seeds, and the effect at each
    site."""
    runs, faults = _readable(runs)
    treated = [_summary(run.treated) for run in runs]
    control = [_summary(run.control) for run in runs]
    paths = [run.treated for run in runs if run.treated]
    shown = paths or [run.control for run in runs if run.control]
    parts = [
        _reached(runs),
        "\n".join(map(_wrapped, faults)),
        _outcome(runs) if shown else "",
        _dead(treated, control),
        _shares(runs, treated),
        _wrapped(update_line([summary for summary in treated if summary is not None])),
        _notes([summary for summary in treated + control if summary is not None]),
        conflicts := _conflicts(runs),
        _effects(shown, bool(conflicts)) if shown else "",
        _places(runs) if shown else "",
    ]
    return "\n\n".join(part for part in parts if part)


def failures(paths: Sequence[Path]) -> str:
    """Return a line for each arm with failed runs or whose transform made NaN or infinity.

    `paths` are all runs of a job; empty if nothing failed.
    """
    arms: dict[str, list[Path]] = {}
    for path in dict.fromkeys(paths):
        arms.setdefault(path.name.rpartition("-seed")[0], []).append(path)
    lines = []
    for label, arm in arms.items():
        name = "the control arm" if label == "none" else label
        failed = [path for path in arm if RunDirectory(path).recorded_state == "failed"]
        if failed:
            log = relpath(failed[0] / ERROR)
            lines.append(
                f"FAILED: {len(failed)} of {count(len(arm), 'run')} of {name}. The first: "
                f"{RunDirectory(failed[0]).reason} (the traceback is in {log})"
            )
        made = [one for path in arm if (one := (_summary(path) or {}).get("nonfinite"))]
        if made:
            lines.append(
                f"FAILED: {made[0]['transform']} returned NaN or infinity for a finite gradient at "
                f"site '{made[0]['site']}', step {made[0]['step']}, and the run diverged "
                f"({len(made)} of {count(len(arm), 'run')})."
            )
    return "\n".join(map(_wrapped, lines))


def _readable(runs: Sequence[Runs]) -> tuple[list[Runs], list[str]]:
    """Return the runs whose files are readable, and a line for each other run."""
    paths = dict.fromkeys(path for run in runs for path in _paths(run))
    broken = {path: fault for path in paths if (fault := fault_of(path))}

    def kept(path: Path | None) -> Path | None:
        return None if path in broken else path

    readable = [
        Runs(
            kept(run.treated),
            kept(run.control),
            {link: kept(path) for link, path in run.without.items()},
        )
        for run in runs
    ]
    return readable, [f"{path.name} is left out: {fault}" for path, fault in broken.items()]


def _summary(path: Path | None) -> Summary | None:
    """Return the summary of a finished run; None if it was cleared by a command with force=true."""
    place = RunDirectory(path) if path is not None else None
    return place.read_summary() if place is not None and place.finished else None


def _outcome(runs: Sequence[Runs]) -> str:
    pairs = [pair for run in runs if (pair := _pair(run))]
    if not pairs:
        alone = [_summary(path) for run in runs for path in (run.treated, run.control)]
        return _alone([summary for summary in alone if summary])
    treated, control = (_arm([pair[side] for pair in pairs]) for side in (0, 1))
    arms = [treated, control]
    about = [" ".join(diverged(arms)), *about_metrics(arms)]
    lost = [filled(line) for line in about if line]
    compared = compare([treated, control])
    by_metric = {one.metric: (one, one.difference) for one in compared if one.difference}
    if (empty := vacuous(compared[0])) and not by_metric:
        return "\n".join([*lost, filled(empty)])
    if not by_metric:
        about[0] = " ".join([*diverged(arms)[:-1], NO_PAIR])
        alone = [_alone([run.summary for run in arm.runs if run.summary], arm.name) for arm in arms]
        return "\n".join([*map(filled, filter(None, about)), *alone])
    shown = {key: text for key, text in titles(_first(treated)).items() if key in by_metric}
    heads = ["higher", "difference", "95 % interval", "sign-flip p"]
    rows = [["", treated.name, control.name, *heads]]
    rows += [_row(key, text, *by_metric[key]) for key, text in shown.items()]
    step_times = costs([treated, control])
    if control.name == PLAIN:
        rows.append([*_time_row(step_times), ""])
    headline = next(iter(by_metric))
    difference = by_metric[headline][1]
    one = replace(by_metric[headline][0], plain=control.name)
    sentence = answer(treated.name, control.name, headline, difference)
    more = [*other_metrics(compared, headline), *about_controls([one])]
    sentence = filled(" ".join([sentence, *more]))
    few = "" if FEW in sentence else about_p(difference.n)
    by_seed = {key: by_metric[key][0].differences for key in shown}
    bootstrap = filled(bootstrap_line(by_seed))
    notes = [note for note in (few, bootstrap, _measured(step_times, treated, control)) if note]
    same = filled(repeats_line(compared))
    return "\n".join([*lost, sentence, *([same] if same else []), "", _fitted(rows), *notes])


def _pair(runs: Runs) -> tuple[LoadedRun, LoadedRun] | None:
    """Return a seed's two runs as `LoadedRun`; None if one has not ended."""
    treated, control = _summary(runs.treated), _summary(runs.control)
    if treated is None or control is None or runs.treated is None or runs.control is None:
        return None
    beside = _found(runs.control, control, "control")
    return replace(_found(runs.treated, treated, "treated"), control=beside.name), beside


def _found(path: Path, summary: Summary, arm: str) -> LoadedRun:
    measured = RunDirectory(path).known_facts().get("measured") or {}
    return LoadedRun(
        path,
        summary["state"],
        arm=arm,
        label=summary["label"],
        summary=summary,
        metric=measured.get("metric") or "",
        config=RunDirectory(path).read_config(),
    )


def _arm(runs: Sequence[LoadedRun]) -> Arm:
    name = runs[0].label
    if runs[0].arm == "control":
        name = "control" if name == "none" else name.partition("-")[0].replace("_", "-")
    return Arm(name, tuple(runs), {})


def _reached(runs: Sequence[Runs]) -> str:
    """Return which seeds reached the stopping condition."""
    arms: list[Arm] = []
    for arm in ("treated", "control"):
        loaded = []
        for run in runs:
            path, beside = getattr(run, arm), run.control if arm == "treated" else None
            if path and (summary := _summary(path)):
                loaded.append(replace(_found(path, summary, arm), control=beside and beside.name))
        arms += [_arm(loaded)] if loaded else []
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
    """Return the table of the share of each link that was left out in some run."""
    key = next((key for key in HEADLINE for summary in treated if summary and key in summary), "")
    whole = [_finished(summary, key) for summary in treated]
    links = {
        link: (whole, [_finished(_summary(run.without.get(link)), key) for run in runs])
        for link in dict.fromkeys(link for run in runs for link in run.without)
    }
    return shares_text(key, links) if links and key else ""


def _finished(summary: Summary | None, key: str) -> float | None:
    return summary.get(key) if summary and summary["state"] == "finished" else None


def _fitted(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of outcomes; in a narrow terminal without some of its columns."""
    for spared in ((), (3,), (1, 2, 3)):
        columns = [column for column in range(len(rows[0])) if column not in spared]
        table = aligned([[row[column] for column in columns] for row in rows])
        if max(map(len, table.splitlines())) <= table_width():
            break
    return table


def _row(key: str, title: str, outcome: Outcome, difference: Difference) -> list[str]:
    means = [value(key, fmean(values)) for values in (outcome.treated, outcome.control)]
    higher = f"{difference.higher}/{difference.n}"
    shown = [*means, higher, amount(key, difference.mean), interval(key, difference)]
    return [title, *shown, p_text(outcome.p_value)]


def _time_row(costs: Sequence[Cost]) -> list[str]:
    """Step times; a run that was resumed after its last step has none."""
    if not costs:
        return ["step time", "-", "-", "", "-", ""]
    (cost,) = costs
    ratios = cost.ratios
    times = [f"{cost.treated_ms:.3g} ms", f"{cost.control_ms:.3g} ms"]
    spread = f"{min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%} (range)" if len(ratios) > 1 else ""
    return ["step time", *times, "", f"{median(ratios) - 1:+.0%}", spread]


def _measured(costs: Sequence[Cost], arm: Arm, control: Arm) -> str:
    if control.name != PLAIN:
        return filled(
            f"No step times: the {control.name} arm runs a surgery too; control=plain tells what "
            f"{arm.name} costs."
        )
    if not costs or costs[0].measured_ms is None:
        return ""
    every = _first(arm)["effects_every"]
    if every == 1:
        return filled(
            "Step time: median over the steps, each of which measures the effects on gradients; "
            "its difference is the median over the seeds."
        )
    return filled(
        "Step time: median over the steps that measure no effects; its difference is the median "
        f"over the seeds. A step that measures the effects on gradients (one in {every}) takes "
        f"{costs[0].measured_ms:.3g} ms with {arm.name}."
    )


def _alone(summaries: Sequence[Summary], name: str = "") -> str:
    """Runs with nothing to compare them with; without a `name` of their arm there is no control."""
    whole = [summary for summary in summaries if summary["state"] == "finished"]
    label = summaries[0]["label"]
    title = "plain run, no surgery" if label == "none" else f"{label}, no control"
    lines = [f"{name or title}: {count(len(summaries), 'seed')}"]
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
        present = [path for path in paths if path is not None]
        summary = next((known for path in present if (known := _summary(path))), None)
        if summary:
            arms.append(("control" if summary["label"] == "none" else summary["label"], present))
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
        parts.append(f"{filled(head)}\n\n{_effect_text(examined)}")
    return "\n\n".join(parts)


def _effect_text(rows: list[dict[str, object]]) -> str:
    for row in rows:
        if row["transform"] == "none":
            row["norm_after"] = None  # what it was before: nothing was done
    ranks = {transform: rank for rank, transform in enumerate(_in_order(rows))}
    rows.sort(key=lambda row: ranks[row["transform"]])
    return effect_text(rows, table_width())


def _without_transform(path: Path) -> bool:
    """Whether an aggregator is all the surgery that there was."""
    config = RunDirectory(path).read_config() or {}
    return bool(config.get("aggregator")) and not config.get("transform")


def _in_order(rows: Sequence[dict[str, object]]) -> list[object]:
    return list(dict.fromkeys(row["transform"] for row in rows))


def _notes(summaries: Sequence[Summary]) -> str:
    """Return a line for each different first sentence of the notes, worded as in its first run."""
    kinds: dict[str, list[str]] = {}
    for summary in summaries:
        for note in summary.get("notes", []):
            kinds.setdefault(note.partition(". ")[0], []).append(note)
    lines = [f"Note ({count(len(notes), 'run')}): {notes[0]}" for notes in kinds.values()]
    return "\n".join(_wrapped(line) for line in lines)


def _places(runs: Sequence[Runs]) -> str:
    paths = [path for run in runs for path in _paths(run)]
    folder = relpath(paths[0].parent)
    return f"{count(len(set(paths)), 'run')} in {folder}"


def _paths(run: Runs) -> list[Path]:
    paths = [run.treated, run.control, *run.without.values()]
    return [path for path in paths if path is not None]


def _wrapped(line: str) -> str:
    """Wrap lines without breaking names, so that they can be copied."""
    return folded(line, prose_width())


MAX_LISTED = 20
MAX_WHOLE = 8  # with more arms only the headline is printed, the page has the rest
SHORT = {
    UNCLEAR: "unclear",
    "one seed: no interval": "",
    "two seeds: no interval": "",
}  # readings in the table
SPARED = (
    ("treated", "control"),
    ("higher",),
)  # columns left out in a narrow terminal, in this order
NARROW = 13  # a column of words is at least as wide, as for `higher (hint)`
NARROWEST = 24  # column of names that are folded rather than a table cut in two

LOOKS = {"finished": "green", "diverged": "red", "failed": "red", "unreadable": "red"}


def overview(report: StudyReport) -> str:
    """Return the overview of a study as plain text of the terminal's width."""
    width = table_width()
    console = Console(
        file=StringIO(), width=width, highlight=False, color_system=None, force_jupyter=False
    )
    _print(report, console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip()


def print_pairs(outcomes: Sequence[Outcome]) -> None:
    """Print arms compared with each other: a sentence for each pair, a table for each metric."""
    width = table_width()
    console = Console(file=StringIO(), width=width, highlight=False, color_system=None)
    for one in outcomes:
        if one.metric == outcomes[0].metric:
            pair = one.arm.name.removesuffix(f" - {one.plain}")
            sentence = f"{one.arm.name}: nothing to compare."
            if one.difference:
                sentence = answer(pair, one.plain, one.metric, one.difference, one.q_value)
            console.print(Text(_folded(sentence.replace(f"the {one.plain} arm", one.plain), width)))
    for metric in dict.fromkeys(one.metric for one in outcomes):
        console.print()
        known = [one for one in outcomes if one.metric == metric and one.is_known]
        heads = {"treated": "first", "control": "second"}
        console.print(_outcomes(known, title(metric), width, heads))
    assert isinstance(console.file, StringIO)
    print("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()))


def print_overview(report: StudyReport) -> None:
    """To standard output, with colours if that is a terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print(report, console)
    else:
        console.print(Text(overview(report)), soft_wrap=True)


def _print(report: StudyReport, console: Console) -> None:
    console.print(Text(_folded(report.answer, console.width)))
    for text in report.cautions:
        console.print(Text(text, style="dim"))
    console.print()
    console.print(_states(report))
    for text in [*report.effort, report.about_tests]:
        if text:
            console.print(Text(text))
    arms = len({outcome.arm.name for outcome in report.outcomes})
    compared = any(outcome.difference for outcome in report.outcomes)
    for metric, name in list(report.metrics.items())[: None if arms <= MAX_WHOLE else 1]:
        outcomes = [one for one in report.outcomes if one.metric == metric and one.is_known]
        if compared and outcomes:
            console.print()
            console.print(_outcomes(outcomes, name, console.width))
    for text in [*([""] if report.tunings else []), *tuning_lines(report.tunings)]:
        console.print(Text(text))
    if report.alone:
        console.print()
        console.print(_study_alone(report))
    if report.conflicts:
        console.print()
        for table in conflict_tables(report, console.width):
            console.print(table)
        console.print(Text(_folded(about_conflicts(report.conflicts), console.width), style="dim"))
    if arms <= MAX_WHOLE:
        for text in [*_study_shares(report), *_updates(report), *others_lines(report.conflicts)]:
            console.print()
            console.print(Text(text))
    if _unfinished(report).row_count:
        console.print()
        console.print(_unfinished(report))


def _folded(text: str, width: int) -> str:
    """In lines; rich would break at any kind of space."""
    return fill(unbroken(text), width, break_on_hyphens=False).replace("\u00a0", " ")


def _study_alone(report: StudyReport) -> Table:
    title = "not compared: mean (least to most)"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, head in enumerate(["arm", "n", *report.metrics.values()]):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for row in alone_rows(report.alone, list(report.metrics)):
        table.add_row(*[Text(cell) for cell in row])
    return table


def conflict_tables(report: StudyReport, width: int) -> list[Table]:
    """An arm a row, a long name in several lines; in two tables where one would not fit."""
    heads, rows = conflict_rows(report.conflicts)
    name, *widths = (
        max(map(len, [*head.split("\n"), *cells]))
        for head, *cells in zip(heads, *rows, strict=True)
    )
    if min(name, NARROWEST) + sum(widths) + 2 * len(widths) <= width:
        return [_conflict_table(heads, rows)]
    half = SINGLE_NUMBERS
    last = [[row[0], *row[half:]] for row in rows]
    return [
        _conflict_table(heads[:half], [row[:half] for row in rows]),
        _conflict_table([heads[0], *heads[half:]], last),
    ]


def _conflict_table(heads: list[str], rows: list[list[str]]) -> Table:
    title = "conflict between tasks"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, head in enumerate(heads):
        justify = "right" if place else "left"
        table.add_column(head, justify=justify, no_wrap=place > 0, overflow="fold")
    for row in rows[:MAX_LISTED]:
        table.add_row(*[Text(cell) for cell in row])
    if len(rows) > MAX_LISTED:
        table.add_row(Text(f"and {len(rows) - MAX_LISTED} more: the page lists them"))
    return table


def _study_shares(report: StudyReport) -> list[str]:
    """Return a table of each link's share in the headline metric, for each chain."""
    headline = next((key for key in report.metrics), "")
    shares = [outcome for outcome in report.shares if outcome.metric == headline]
    texts = []
    for name in dict.fromkeys(outcome.arm.name for outcome in shares):
        links = {o.link: (o.treated, o.control) for o in shares if o.arm.name == name}
        texts.append(f"{name}. {shares_text(headline, links)}")
    return texts


def _updates(report: StudyReport) -> list[str]:
    return [f"{effect.arm.name}: {update_line(effect.summaries)}" for effect in report.updates]


def _states(report: StudyReport) -> Text:
    text = Text(f"{count(len(report.runs), 'run')}:")
    for state, number in report.states.items():
        text.append(f" {number} {state}", LOOKS.get(state, "yellow"))
    return text


def _outcomes(
    outcomes: list[Outcome],
    name: str,
    width: int,
    called: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Return a metric's table; in a narrow terminal without the columns of `SPARED`."""
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
    many = any(outcome.q_value is not None for outcome in outcomes)
    columns = ["arm", "higher", "treated", "control", "difference", "95 % interval", "p"]
    heads = [*columns, *["q"] * many, "reading"]
    rows = [_outcome_row(outcome, many) for outcome in outcomes]
    widths = {head: max(map(len, cells)) for head, *cells in zip(heads, heads, *rows, strict=True)}
    widths["arm"] = min(widths["arm"], NARROWEST)
    widths["reading"] = min(widths["reading"], NARROW)
    for spared in SPARED:
        if sum(widths.values()) + 2 * len(widths) > width:
            widths = {head: number for head, number in widths.items() if head not in spared}
    for head in widths:
        words = head in ("arm", "reading")  # which can be wrapped, numbers not
        least = min(widths[head], NARROW) if words else None
        justify = "left" if words else "right"
        named = called.get(head, head)
        table.add_column(
            named, justify=justify, no_wrap=not words, overflow="fold", min_width=least
        )
    for row in rows:
        cells = [cell for head, cell in zip(heads, row, strict=True) if head in widths]
        table.add_row(*[Text(cell) for cell in cells])
    return table


def _outcome_row(outcome: Outcome, many: bool) -> list[str]:
    difference, key = outcome.difference, outcome.metric
    lost = ", ".join(f"{number} {state}" for state, number in outcome.states.items())
    if difference is None:
        higher = "-" if outcome.vacuous_control else f"0/{outcome.planned}"
        return [outcome.arm.name, higher, *[""] * (5 + many), lost]
    return [
        outcome.arm.name,
        f"{difference.higher}/{difference.n}",
        value(key, sum(outcome.treated) / difference.n),
        value(key, sum(outcome.control) / difference.n),
        amount(key, difference.mean),
        interval(key, difference),
        p_text(outcome.p_value),
        *[p_text(outcome.q_value)] * many,
        "; ".join(part for part in (SHORT.get(outcome.reading, outcome.reading), lost) if part),
    ]


def _unfinished(report: StudyReport) -> Table:
    """Every run that is not finished, with the reason; of very many the first."""
    table = Table(box=None, pad_edge=False)
    for head in ("not finished", "state", "reason"):
        table.add_column(head, overflow="fold")
    runs = [run for run in report.runs if run.state != "finished"]
    for run in runs[:MAX_LISTED]:
        table.add_row(Text(run.name), Text(run.state, LOOKS.get(run.state, "")), Text(run.reason))
    if len(runs) > MAX_LISTED:
        table.add_row(Text(f"and {len(runs) - MAX_LISTED} more: the page lists them"), "", "")
    return table
