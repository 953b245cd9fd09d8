"""The jobs of a command: planned before the first is started, looked up when the last has ended."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradsurg.effects.tables import aligned
from gradsurg.training.run import Run
from gradsurg.training.run_directory import ERROR, RunDirectory, RunState, merged_facts

WORST_FIRST: tuple[RunState, ...] = (
    "failed",
    "interrupted",
    "running",
    "planned",
    "diverged",
    "finished",
)

TOLD: dict[RunState, str] = {
    "planned": "to train",
    "interrupted": "interrupted before, going on",
    "failed": "failed before",
    "running": "another process is at",
    "diverged": "diverged before, skipped",
    "finished": "finished before, skipped",
}


@dataclass(frozen=True)
class PlannedRun:
    """A run by its directory, with what the directory should say from the start."""

    path: Path
    facts: dict[str, object]
    identity: dict[str, object]


@dataclass(frozen=True)
class Job:
    """One job: the words of the command line that it was made of, and its runs."""

    words: tuple[str, ...]
    runs: tuple[PlannedRun, ...]


def job_of(words: Sequence[str], runs: Iterable[Run], out: Path) -> Job:
    """What is kept of a job that has been checked: no model and no data."""
    planned = (PlannedRun(run.directory(out), run.facts, run.identity) for run in runs)
    return Job(tuple(words), tuple(planned))


def prepare(jobs: Sequence[Job], force: bool) -> Counter[RunState]:
    """Write down each run that is to be, once; how many there are in each state.

    With `force` the files of earlier runs are removed, here and once: two jobs can have the same
    control, and a job that is started again on another machine goes on from its checkpoint.
    """
    states: Counter[RunState] = Counter()
    for run in _once(jobs):
        place = RunDirectory(run.path)
        state: RunState = "running"
        if not force and place.finished:
            state = place.recorded_state
            place.add_controls(run.facts)
        else:
            with place.lock(wait=force) as alone:
                if alone:
                    facts = merged_facts(place.known_facts(), run.facts)
                    if force:
                        place.clear()
                    state = place.recorded_state
                    place.plan(facts, run.identity)
        states[state] += 1
    return states


def beginning(num_jobs: int, states: Counter[RunState], retry_failed: bool) -> str:
    """What is about to happen, in one line."""
    failed = "tried again" if retry_failed else "kept so (retry_failed=false)"
    told = [
        f"{count} {TOLD[state]}{f', {failed}' if state == 'failed' else ''}"
        for state, count in states.items()
    ]
    jobs = f"{num_jobs} job{'s' if num_jobs > 1 else ''}"
    return f"{jobs}, {states.total()} runs: {'; '.join(told)}"


def ending(jobs: Sequence[Job]) -> tuple[str, bool]:
    """A table of all jobs with state, reason and log, and whether all their runs have finished."""
    varying = _varying(jobs)
    rows = [["job", "state", "reason"]]
    whole = True
    for job in jobs:
        words = " ".join(word for word in job.words if _key(word) in varying)
        state, reason = _outcome(job)
        whole &= state == "finished"
        rows.append([words or "(the only one)", state, reason])
    return aligned(rows), whole


def _outcome(job: Job) -> tuple[str, str]:
    """The worst state among the runs of a job, and the reason of the first run in it."""
    states = [RunDirectory(run.path).state for run in job.runs]
    worst = min(states, key=WORST_FIRST.index)
    count = states.count(worst)
    state = worst if count == len(states) else f"{count} of {len(states)} runs {worst}"
    if worst == "finished":
        return worst, ""
    first = RunDirectory(job.runs[states.index(worst)].path)
    if worst == "failed":
        return state, f"{first.reason} ({os.path.relpath(first.path / ERROR)})"
    step = first.read_summary().get("diverged_step") if worst == "diverged" else None
    if step is not None:
        return state, f"{os.path.relpath(first.path)}: the loss of step {step} was not finite"
    return state, os.path.relpath(first.path)


def _once(jobs: Sequence[Job]) -> list[PlannedRun]:
    """Each run by its directory, with the controls that any of the jobs gives it."""
    found: dict[Path, PlannedRun] = {}
    for run in (run for job in jobs for run in job.runs):
        before = found[run.path].facts if run.path in found else {}
        found[run.path] = replace(run, facts=merged_facts(before, run.facts))
    return list(found.values())


def _varying(jobs: Sequence[Job]) -> set[str]:
    """The keys that have more than one value among the jobs."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for word in job.words:
            values.setdefault(_key(word), set()).add(word)
    return {key for key, words in values.items() if len(words) > 1}


def _key(word: str) -> str:
    return word.partition("=")[0]
