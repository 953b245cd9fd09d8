"""Count the runs of a command and record them as planned; tabulate their states at the end."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from gradsurg.effects.tables import aligned
from gradsurg.experiment.errors import MAX_RUNS, ConfigError, too_many
from gradsurg.experiment.power import arm_text
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import (
    CONFIG,
    ENDED,
    ERROR,
    FACTS,
    SUMMARY,
    RunDirectory,
    RunState,
    merged_facts,
)
from gradsurg.experiment.run_identity import edited_modules
from gradsurg.experiment.run_reader import known
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.trial_step import step_seconds
from gradsurg.plugins.messages import printable, tell, terminal_width

ANNOUNCED_RUNS = 100  # for more runs the number and the least time are printed at the start
ANNOUNCED_SECONDS = 3600  # the same for fewer runs that take longer than this
TIMED_STEPS = 10_000  # with fewer steps in all none is timed: timing takes a few steps itself

STATES: dict[RunState, str] = {
    "failed": "failed before",
    "interrupted": "interrupted before, to resume",
    "running": "running in another process",
    "planned": "to train",
    "diverged": "diverged before, skipped",
    "finished": "finished before, skipped",
}
"""What `summary_line` prints for each state of a run; worst first, the order of `_outcome`."""


@dataclass(frozen=True)
class Job:
    """The overrides of one job, its runs, and the folder of their studies."""

    words: Sequence[str]
    runs: Sequence[Run]
    out: Path

    @property
    def paths(self) -> list[Path]:
        """The directories of the runs."""
        return [run.directory(self.out) for run in self.runs]


def announce(experiments: Sequence[Experiment]) -> None:
    """Print the number of runs left to train and the time of their steps, if many or long.

    A run that jobs share counts once. Raises ConfigError for more than `MAX_RUNS` without `yes`.
    """
    settings = experiments[0].settings
    runs: dict[Path, Run] = {}
    for each in experiments:
        later = () if each.compared else each.pairs  # runs to compare, known once tuning ends
        own = [*each.runs, *(run for pair in later for run in pair.runs)]
        runs |= {run.directory(each.settings.out_folder): run for run in own}
    if len(runs) > MAX_RUNS and not settings.yes:
        raise ConfigError([f"sweep: {too_many(len(runs), 'runs')}"])
    left = [run for path, run in runs.items() if settings.force or not (path / SUMMARY).is_file()]
    steps = sum(run.schedule.steps * run.compute.accumulate for run in left)
    are_many = len(left) > ANNOUNCED_RUNS or (settings.splits > 1 and left)
    seconds = steps * step_seconds(left[0]) if are_many or steps >= TIMED_STEPS else 0
    if not are_many and seconds < ANNOUNCED_SECONDS:
        return
    text = f"{len(left):,} runs of {left[0].schedule.steps:,} steps"
    if len(experiments) > 1:
        text = f"{len(experiments):,} jobs, {text}"
    elif settings.splits > 1:
        seeds, arms = len(settings.all_seeds), len(experiments[0].pairs[0].runs)
        text += f" ({settings.splits} splits x {seeds} seeds of its own x {arms} arms)"
    lasting, device = _duration(seconds), left[0].device
    tell(f"{text}: at least {lasting} on {device}, timed without surgery and evaluation")


def edited_lines(jobs: Iterable[Job]) -> list[str]:
    """Return a line for each file of the user that was edited since a run of equal label and seed.

    Of each job only the first run that depends on such files is looked up, and only if it is new.
    """
    lines: dict[str, None] = {}
    trained: dict[str, dict[str, Mapping[str, object]]] = {}  # earlier configs, by label and seed
    for job in jobs:
        run = next((run for run in job.runs if run.identity["sources"]), None)
        if run is None or (path := run.directory(job.out)).exists():
            continue
        if (stem := path.name.rpartition("-")[0]) not in trained:
            found = sorted(path.parent.glob(f"{escape(stem)}-{'[0-9a-f]' * 8}"))
            trained[stem] = {before.name: known(before / CONFIG) for before in found}
        for name, before in trained[stem].items():
            if modules := edited_modules(before, run.identity):
                files = ", ".join(dict.fromkeys(map(_file_of, modules)))
                lines[f"{files}: edited since {name} was trained; trained anew beside it"] = None
                break
    return [*lines]


def plan_runs(
    jobs: Sequence[Job], force: bool, search: Mapping[str, object] | None = None
) -> Counter[RunState]:
    """Record each run as planned, once, and return how many runs are in each state.

    With `force` the files of earlier runs are removed here and not in the jobs: two jobs may share
    a control, and a job that is restarted on another machine must resume from its checkpoint. The
    fact `looked` of a new run is the number of runs of its arm that had already ended, if any;
    `search` is a fact of each trial of a search.
    """
    runs: dict[Path, Run] = {}
    facts: dict[Path, dict[str, Any]] = {}  # Any: any JSON value
    for job in jobs:
        for path, run in zip(job.paths, job.runs, strict=True):
            now = run.facts | {"command": list(job.words)} | ({"search": search} if search else {})
            runs[path], facts[path] = run, merged_facts(facts.get(path, {}), now)
    before = {path: "planned" if force else RunDirectory(path).recorded_state for path in runs}
    # Tuning runs are in another folder and count apart.
    arms = {path: (path.parent, arm_text(run.identity)) for path, run in runs.items()}
    looked = Counter(arms[path] for path, state in before.items() if state in ENDED)
    states: Counter[RunState] = Counter()
    for path, state in before.items():
        directory = RunDirectory(path)
        if state in ENDED:
            directory.add_facts(facts[path])
        elif directory.is_foreign:
            state = "failed"  # `execute` reports which link
        else:
            with directory.lock(wait=force) as alone:
                if alone and force:
                    directory.clear()
                if (number := looked[arms[path]]) and not (path / FACTS).is_file():
                    facts[path]["looked"] = number
                state = directory.recorded_state if alone else "running"
                if alone:
                    directory.plan(facts[path], runs[path].identity)
        states[state] += 1
    return states


def summary_line(num_jobs: int, states: Counter[RunState], retry_failed: bool) -> str:
    """Return one line with the number of jobs, and of runs in each state."""
    failed = ", tried again" if retry_failed else ", not retried (retry_failed=false)"
    counts = [f"{n} {STATES[state]}{failed * (state == 'failed')}" for state, n in states.items()]
    jobs = f"{num_jobs} job{'s' if num_jobs > 1 else ''}"
    return f"{jobs}, {states.total()} runs: {'; '.join(counts)}"


def outcome_table(jobs: Sequence[Job]) -> tuple[str, bool]:
    """Return a table with the state of each job, and whether all runs have finished."""
    values: dict[str, set[str]] = {}
    for word in (word for job in jobs for word in job.words):
        values.setdefault(word.partition("=")[0], set()).add(word)
    rows = [["job", "state", "reason"]]
    for job in jobs:
        words = " ".join(word for word in job.words if len(values[word.partition("=")[0]]) > 1)
        state, reason = _outcome(job)
        rows.append([printable(words) or "(the only one)", state, printable(reason)])
    width = [width] if (width := terminal_width(sys.stdout)) else []
    return aligned(rows, (0, 2), *width), {"finished"} == {state for _, state, _ in rows[1:]}


def _duration(seconds: float) -> str:
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    length, unit = next((each for each in units if seconds >= 2 * each[0]), (1, "seconds"))
    return f"{seconds / length:,.0f} {unit}"


def _file_of(name: str) -> str:
    """Return the file of a module or of a dotted path's module; `name` itself if there is none."""
    modules = (sys.modules.get(module) for module in (name, name.rpartition(".")[0]))
    file = next(filter(None, (getattr(module, "__file__", None) for module in modules)), None)
    return printable(os.path.relpath(file)) if file else name


def _outcome(job: Job) -> tuple[str, str]:
    """Return the worst state of a job's runs, and the reason of the first run in that state."""
    directories = [RunDirectory(path) for path in job.paths]
    states = [directory.state for directory in directories]
    worst = min(states, key=[*STATES].index)
    if worst == "finished":
        return worst, ""
    count, first = states.count(worst), directories[states.index(worst)]
    state = worst if count == len(states) else f"{count} of {len(states)} runs {worst}"
    place = os.path.relpath(first.path)
    if worst == "failed":
        return state, f"{first.reason} ({os.path.join(place, ERROR)})"
    summary = first.read_summary()
    if made := summary.get("nonfinite"):
        what = f"{made['transform']} returned NaN or infinity for a finite gradient"
        return state, f"{place}: {what} at site '{made['site']}', step {made['step']}"
    if (step := summary.get("diverged_step")) is not None:
        return state, f"{place}: the loss of step {step} was not finite"
    return state, place
