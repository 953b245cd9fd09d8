"""Text for the terminal: the report of a job after training, and the overview of a study."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from os.path import relpath
from pathlib import Path

import polars as pl

from gradsurg.effects.tables import effect_table as effect_text
from gradsurg.experiment.frames import effect_table
from gradsurg.experiment.run_directory import ERROR, RunDirectory
from gradsurg.plugins.messages import printable
from gradsurg.report.cautions import cautions
from gradsurg.report.compare import compare, compare_job
from gradsurg.report.measures import costs, link_shares
from gradsurg.report.search import trials_text
from gradsurg.report.study import Study, read_study
from gradsurg.report.tables import (
    INTERVAL,
    SHORT,
    alone_table,
    fitted,
    outcome_table,
    shares_text,
    uncompared,
)
from gradsurg.report.tuning import tuning_text
from gradsurg.report.verdict import (
    Row,
    answer,
    rows_of,
    sentence,
    sweeps,
)
from gradsurg.report.wording import count, duration, filled, table_width, title
from gradsurg.stats import Margin

MAX_LISTED = 20
MAX_WHOLE = 8  # with more arms only the headline is printed, the page has the rest


@dataclass(frozen=True)
class Runs:
    """The run directories of one seed; one of them can be missing.

    `without` are the directories of the chain without a link.
    """

    treated: Path | None
    control: Path | None
    without: Mapping[str, Path | None] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.treated, self.control, *self.without.values()) if path]


def report(runs: Sequence[Runs]) -> str:
    """Return the report of a job: verdict, cautions, outcomes, and the effects at each site."""
    paths = list(dict.fromkeys(path for run in runs for path in run.paths))
    study, shares = job_study(runs), []
    if any(run.without for run in runs):
        shares = shares_text(link_shares(read_study(paths[0].parent, [p.name for p in paths])))
    frame = compare_job(study, read_study(paths[0].parent))
    rows = frame.filter(pl.col("block").is_null(), pl.col("difference").is_not_null()).to_dicts()
    ended = {run.path for run in study.all_runs if run.summary}  # also those of later controls
    parts = [
        _head(study, frame),
        _job_table(study, rows) if rows else fitted(alone_table(study, study.arms)),
        *shares,
        _lines(_notes(study)),
        conflicts := _conflicts(study),
        _effects(study, [run.treated for run in runs if run.treated] or paths, bool(conflicts)),
        f"{count(len(ended.union(paths)), 'run')} in {printable(relpath(paths[0].parent))}",
    ]
    return "\n\n".join(part for part in parts if part)


def overview(study: Study, margin: Margin | None = None) -> str:
    """Return the overview of a study as plain text of the terminal's width."""
    frame = compare(study, margin)
    few = frame["arm"].n_unique() <= MAX_WHOLE
    alone = uncompared(study, frame)
    first, *tables = _tables(frame, first_only=not few) or [""]
    parts = [
        _head(study, frame, margin, sweeps(study, frame), first),
        _lines(effort(study)),
        *tables,
        _lines(tuning_text(*study.tunings)),
        "\n".join(trials_text(study.trials)),
        f"not compared\n{fitted(alone_table(study, alone, None if few else 1))}" if alone else "",
        _conflicts(study),
        *(shares_text(link_shares(study)) if few else []),
        _unfinished(study),
    ]
    return "\n\n".join(part for part in parts if part)


def pairs_text(study: Study, frame: pl.DataFrame, margin: Margin | None = None) -> str:
    """Return arms compared with each other: a sentence for each pair, a table for each metric."""
    pairs, possible = frame["arm"].n_unique(), comb(len(study.arms), 2)
    warned = cautions(study, frame)
    if pairs < possible:
        warned.append(f"{pairs} of {possible} pairs of arms: p and q do not know of the choice.")
    first = pl.col("arm").str.strip_suffix(pl.lit(" - ") + pl.col("against"))
    told = [
        sentence(part.with_columns(arm=first), margin=margin)
        for _, part in frame.group_by("arm", maintain_order=True)
    ]
    tables = _tables(frame, treated="first", control="second")
    return "\n\n".join([_lines(told), _lines(warned), *tables])


def _tables(frame: pl.DataFrame, first_only: bool = False, **called: str) -> list[str]:
    """A table for each metric with its title, or only for the verdict's metrics.

    `called` renames columns.
    """
    compared = rows_of(frame) if first_only else frame.to_dicts()
    metrics = dict.fromkeys(row["metric"] for row in compared if row["n"])
    return [
        f"{title(metric)}\n"
        f"{fitted(outcome_table(frame.filter(metric=metric).to_dicts(), called, SHORT))}"
        for metric in metrics
    ]


def _head(
    study: Study,
    frame: pl.DataFrame,
    margin: Margin | None = None,
    over: Sequence[str] = (),
    table: str = "",
) -> str:
    """The verdict, a table with a line for each arm, sweeps and cautions."""
    told = "\n".join(filled(printable(text)) for text in answer(study, frame, margin))
    parts = (told, table, _lines(over), _lines(cautions(study, frame)))
    return "\n\n".join(filter(None, parts))


def _lines(texts: Sequence[str]) -> str:
    """Wrap lines without breaking names, so that they can be copied."""
    return "\n".join(filled(printable(text), "  ") for text in texts)


def job_study(runs: Sequence[Runs]) -> Study:
    """Return the study of a job's runs alone, each compared with the control of this job.

    The other controls that treated runs name are in it.
    """
    beside = {run.treated.name: run.control and run.control.name for run in runs if run.treated}
    given = {*beside, *(run.control.name for run in runs if run.control)}
    study = read_study(next(path.parent for run in runs for path in run.paths), given)
    treated = [run for run in study.all_runs if run.path.name in beside]
    wanted = given.union(*(run.controls.values() for run in treated))
    arms = []
    for arm in study.arms:
        members = [run for run in arm.runs if run.path.name in wanted]
        own = tuple(replace(run, control=beside.get(run.path.name)) for run in members)
        arms += [replace(arm, runs=own)] * bool(own)
    return replace(study, arms=arms)


def failures(paths: Sequence[Path]) -> str:
    """Return a line for each arm with failed runs or whose transform made NaN or infinity.

    `paths` are all runs of a job; empty if nothing failed.
    """
    arms: dict[str, list[RunDirectory]] = {}
    for path in dict.fromkeys(paths):
        arms.setdefault(path.name.rpartition("-seed")[0], []).append(RunDirectory(path))
    lines = []
    for label, runs in arms.items():
        name = "the control arm" if label == "none" else label
        of = count(len(runs), "run")
        if failed := [run for run in runs if run.recorded_state == "failed"]:
            lines.append(
                f"FAILED: {len(failed)} of {of} of {name}. The first: {failed[0].reason} (the "
                f"traceback is in {relpath(failed[0].path / ERROR)})"
            )
        summaries = [run.read_summary() for run in runs if run.finished]
        made = [fault for one in summaries if isinstance(fault := one.get("nonfinite"), dict)]
        if made:
            lines.append(
                f"FAILED: {made[0]['transform']} returned NaN or infinity for a finite gradient at "
                f"site '{made[0]['site']}', step {made[0]['step']}, and the run diverged "
                f"({len(made)} of {of})."
            )
    return _lines(lines)


def _job_table(study: Study, rows: Sequence[Row]) -> str:
    """A metric a row, both arms beside each other, and the step times."""
    arms = {"treated": rows[0]["arm"], "control": rows[0]["against"]}
    columns = ("metric", *arms, "difference", INTERVAL, "p", "q", "higher")
    heads, table = outcome_table(rows, {"metric": "", **arms}, columns)
    notes = []
    for cost in costs(study).to_dicts():  # none beside a control that runs a surgery too
        times = [f"{cost[side]:.3g}" for side in ("treated_ms", "control_ms")]
        ends = f"{cost['low'] - 1:+.0%} to {cost['high'] - 1:+.0%}" * (cost["pairs"] > 1)
        row = ["step time (ms)", *times, f"{cost['ratio'] - 1:+.0%}", ends, "", "", ""]
        table.append(row[: len(heads)])
        every = max((run.summary or {}).get("effects_every", 1) for run in study.all_runs)
        which = f"without those that measure effects on gradients (one in {every}, which takes "
        which += f"{cost['measured_ms'] or 0:.3g} ms with {cost['arm']})"
        which = which if every > 1 else "each of which measures the effects on gradients"
        difference = "its difference: median and range over the seeds"
        notes = [f"Step time: median over the steps, {which}; {difference}."]
    spared = ({"higher"}, {"p", "q"}, {*arms.values()})
    return "\n".join([fitted((heads, table), spared), *map(_lines, [notes] if notes else [])])


def _notes(study: Study) -> list[str]:
    """Return a line for each different note, with the details of its first run."""
    kinds: dict[str, list[str]] = {}
    for run in study.all_runs:
        for note, text in run.notes.items():
            kinds.setdefault(note, []).append(text)
    return [f"Note ({count(len(texts), 'run')}): {texts[0]}" for texts in kinds.values()]


def _conflicts(study: Study) -> str:
    if not any((run.config or {}).get("aggregator") for run in study.all_runs):
        return ""
    from gradsurg.report.conflicts import conflict_text  # it imports Altair

    return conflict_text(study)


def _effects(study: Study, paths: Sequence[Path], several: bool) -> str:
    """At each site; an aggregator of `several` tasks has effects only if there is a transform."""
    rows, examined = effect_table(paths), effect_table(paths, examined=True)
    every = {run.summary.get("effects_every", 1) for run in study.all_runs if run.summary}
    when = f" at one step in {every.pop()}" if len(every) == 1 and every != {1} else ""
    about = {f", means over {count(len(paths), 'run')}{when}:": rows}
    if examined:
        only = "acted on no gradient in" if rows else "was not measured in"
        is_only = not any(row["calls"] for row in rows)
        told = f" (the surgery {only} the training):" if is_only else ":"
        after = f" in the examination after the training, means over {count(len(paths), 'run')}"
        about = {**({} if is_only else about), f"{after}{told}": examined}
    parts = []
    for text, table in about.items():
        for row in table:
            if row["transform"] == "none":
                row["norm_after"] = None  # what it was before: nothing was done
        if table:
            parts += [_lines([f"Gradients at each site{text}"]), effect_text(table, table_width())]
    if parts:
        return "\n\n".join(parts)
    configs = [run.config or {} for run in study.all_runs]
    if any(config.get("aggregator") and not config.get("transform") for config in configs):
        return "" if several else "No conflict was measured: effects_every=0."
    return "No effect was measured: effects_every=0, or the transform never acted."


def effort(study: Study) -> list[str]:
    """The number of runs in each state, training time and hardware, a sentence each."""
    states = ", ".join(f"{number} {state}" for state, number in study.states.items())
    sentences = [f"{count(len(study.runs), 'run')}: {states}."]
    ended = [run.summary for run in study.all_runs if run.summary]
    times = [summary["time/train_s"] for summary in ended if summary.get("time/train_s")]
    if times:
        sentences.append(f"Trained for {duration(sum(times))} in all ({count(len(times), 'run')}).")
    places = Counter(str(summary["hardware"]) for summary in ended if summary.get("hardware"))
    told = [
        f"{place} ({count(n, 'run')})" * (len(places) > 1) or place
        for place, n in places.most_common()
    ]
    return [*sentences, *([f"Hardware: {'; '.join(told)}."] if told else [])]


def _unfinished(study: Study) -> str:
    """Every run that is not finished, with the reason; of very many the first."""
    runs = [run for run in study.all_runs if run.state != "finished"]
    rows = [[run.name, run.state, run.reason] for run in runs[:MAX_LISTED]]
    if len(runs) > MAX_LISTED:
        rows.append([f"and {len(runs) - MAX_LISTED} more: the page lists them", "", ""])
    return fitted((["not finished", "state", "reason"], rows), ())
