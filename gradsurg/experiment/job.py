"""Train the runs of one job one after another, and print what happened to them."""

import gc
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path

from gradsurg.experiment.command import only_trials_told, print_notes, report_study
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.planning import Job, plan_runs
from gradsurg.experiment.run import Pair, Run
from gradsurg.experiment.run_directory import ERROR
from gradsurg.experiment.run_reader import BrokenFile, ForeignLink
from gradsurg.experiment.runs import Experiment
from gradsurg.plugins.messages import full_message, printable, tell

HAPPENED = {
    "resumed": "was interrupted, resumed from its checkpoint",
    "retried": "failed before, tried again",
}
_left: list[tuple[Experiment, list[Run]]] = []
"""The busy runs of each job: other processes were training them when the job came to them."""


def train(experiment: Experiment, words: Sequence[str], in_sweep: bool, wait: bool = True) -> bool:
    """Train the runs of a job with these overrides, and report on it unless it is one of a sweep.

    Without `wait` the runs that other processes train are left to `train_left`. Return False if a
    run failed, or if a transform made NaN or infinity in it.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # otherwise each collection scans all modules: a second in all, no garbage
    pairs = _tuned(experiment, words)
    if pairs is None:
        return False
    runs = [*{run.name: run for pair in pairs for run in pair.runs}.values()]
    found = _train_all(experiment, runs, wait)
    records = [record for record in found.values() if record is not None and record.summary]
    if left := [run for run in runs if _is_busy(found[run.name])]:
        _left.append((experiment, left))
    if failed := len(runs) - len(records) - len(left):
        tell(f"{failed} of {len(runs)} runs failed")
    for text in _unmeasured(records):
        tell(text)
    if not in_sweep:
        with only_trials_told():
            _report(experiment, pairs, records)
    return not failed and not any(record.summary.get("nonfinite") for record in records)


def train_left() -> None:
    """Wait for the busy runs of all jobs, and train those that the other processes did not end."""
    while _left:
        _train_all(*_left.pop(0))


def _tuned(experiment: Experiment, words: Sequence[str]) -> Sequence[Pair] | None:
    """Train the tuning runs that are not finished; return the pairs of runs to compare.

    These were not known when the command was planned, and are recorded as planned here. Return None
    if a tuning run failed: it might have been the best one.
    """
    if experiment.tuning is None:
        return experiment.pairs
    tuning = experiment.tuning.runs
    failed = sum(record is None for record in _train_all(experiment, tuning).values())
    pairs = experiment.compared
    if failed or pairs is None:
        tell(f"{failed} of {len(tuning)} tuning runs failed: nothing is chosen")
        return None
    experiment.tuning.write(experiment.settings)
    compared = [run for pair in pairs for run in pair.runs]
    plan_runs([Job(words, compared, experiment.settings.out_folder)], force=False)
    return pairs


def _train_all(
    experiment: Experiment, runs: Sequence[Run], wait: bool = True
) -> dict[str, Record | None]:
    """Train the runs that no other process is training, then with `wait` wait for the busy ones.

    So equal commands divide the runs. Return the records by the name of the run, None for a run
    that failed. Without `wait` the action in the record of a busy run is "busy".
    """
    records = {run.name: _train_one(experiment, run, wait=False) for run in runs}
    for run in runs if wait else ():
        if _is_busy(records[run.name]):
            records[run.name] = _train_one(experiment, run)
    return records


def _is_busy(record: Record | None) -> bool:
    return record is not None and record.action == "busy"


def _train_one(experiment: Experiment, run: Run, wait: bool = True) -> Record | None:
    """Execute one run and print what happened to it; return None if it failed."""
    settings, out = experiment.settings, experiment.settings.out_folder
    split = "" if run.split_seed is None else f", split {run.split_seed}"
    name = printable(f"{run.label}, seed {run.seed}{split}")
    try:
        with chdir(Path.cwd()):  # undoes an os.chdir of a user's code
            record = execute(
                run, out, experiment.loggers, settings.threads, settings.retry_failed, wait
            )
    except Exception as error:  # one line for whatever a run raises; the traceback is in a file
        log = run.directory(out) / ERROR
        hint = "the traceback could not be written"
        if log.is_file():
            hint = f"the traceback is in {os.path.relpath(log)}"
        if isinstance(error, ForeignLink):
            hint = f"remove the link {os.path.relpath(error.file)}"
        elif isinstance(error, BrokenFile):
            hint = "remove the file, or start the run again with force=true"
        tell(f"{name}: {full_message(error)} ({hint})")
        return None
    if record.action == "not retried":
        tell(f"{name}: failed before; not retried (retry_failed=false); {printable(record.reason)}")
    elif record.action in HAPPENED:
        fault = f"; {printable(record.reason)}" if record.reason else ""
        tell(f"{name}: {HAPPENED[record.action]}{fault}")
    if record.note and record.action != "skipped":
        tell(f"{name}: {printable(record.note)}")
    return record


def _unmeasured(records: Iterable[Record]) -> list[str]:
    """Return a line for each measurement that is asked for and that finished runs do not have."""
    notes = Counter(record.note for record in records if record.action == "skipped" and record.note)
    return [
        f"{number} finished run{'s were' if number > 1 else ' was'} {note}: the same command with "
        f"force=true trains {'them' if number > 1 else 'it'} again"
        for note, number in notes.items()
    ]


def _report(experiment: Experiment, pairs: Sequence[Pair], records: Sequence[Record]) -> None:
    """Print the outcome of a single job, and write the report of its study."""
    from gradsurg.report.terminal import Runs, failures, report
    from gradsurg.report.tuning import read_tunings, tuning_text

    settings, out = experiment.settings, experiment.settings.out_folder
    places = {record.run.name: record.directory for record in records}
    if experiment.tuning is not None:
        chosen = tuning_text(*read_tunings(experiment.tuning.write(settings)))
        print("\n".join(chosen), end="\n\n")
    if text := failures([run.directory(out) for pair in pairs for run in pair.runs]):
        print(f"{text}\n")
    if records:
        print(report([Runs(*_places(pair, places)) for pair in pairs]))
    if settings.report is not False:
        report_study(settings.study_folder, experiment.loggers, settings.report is True)
    if skipped := sum(record.action == "skipped" for record in records):
        print(f"{skipped} of them had been finished before; force=true repeats them")
    print_notes(experiment.loggers)


def _places(
    pair: Pair, places: Mapping[str, Path]
) -> tuple[Path | None, Path | None, dict[str, Path | None]]:
    """Return the folders of the treated run, of the control, and of those without each link."""
    treated, control = (run and places.get(run.name) for run in (pair.treated, pair.control))
    return treated, control, {link: places.get(run.name) for link, run in pair.without.items()}
