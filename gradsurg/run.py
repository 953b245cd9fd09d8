"""Train an experiment from the command line: python -m gradsurg.run transform=clip.

Hydra composes the config of each job. `experiment/overrides.py` has the words that it cannot read
and its errors, `experiment/sweep.py` the start and the end of a sweep. Modules that import torch
are imported in the job: help and a wrong name do without them.
"""

import os
import sys
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import gradsurg
from gradsurg.experiment.compose import CONFIG_DIR, plain, register
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.overrides import COMPOSE_ERRORS, explained, prepared
from gradsurg.plugins.messages import full_message, printable, tell
from gradsurg.plugins.pipes import ignore_closed_pipes

if TYPE_CHECKING:
    from gradsurg.experiment.build import Experiment
    from gradsurg.experiment.execution import Record
    from gradsurg.experiment.run import Run
    from gradsurg.experiment.runs import Pair

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
FULL_ERROR = "HYDRA_FULL_ERROR"
HAPPENED = {
    "resumed": "was interrupted, resumed from its checkpoint",
    "retried": "failed before, tried again",
}


def main() -> None:
    """Run the command line.

    The exit code is 0 if all runs finished, 1 if a run failed or diverged, 2 if the command line is
    wrong, 130 after an interruption.
    """
    words = sys.argv[1:]
    try:
        if any(word.partition("=")[0] == "--list" for word in words):
            _list(words)
            return
        register()
        sys.argv[1:] = prepared(words)
        with _errors_in_one_line():
            job()
    except ConfigError as error:
        tell("\n".join(error.faults))
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        tell("interrupted; the same command resumes from the last checkpoint")
        sys.exit(INTERRUPTED)


@hydra.main(config_path=str(CONFIG_DIR), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Run one job: all seeds of one config, treated and control.

    A job of a sweep records its outcome in the folders of its runs; `Sweep` reports on it.
    """
    sweeping = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        experiment = _of_sweep(config) if sweeping else _alone(config)
    except ConfigError as error:
        tell("\n".join(error.faults))
        if sweeping:  # in the process of a launcher, which lacks what the command has
            return
        sys.exit(WRONG_INPUT)
    if experiment.settings.dry_run:
        print(experiment.surgery.plan(experiment.make_model(), experiment.example_input))
    elif experiment.settings.steps:
        succeeded = _train(experiment, sweeping)
        if not sweeping and not succeeded:
            sys.exit(FAILED)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Exit with one line for an exception of Hydra, of its plug-ins or of a launcher."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its exceptions and prints nothing
    try:
        yield
    except Exception as error:  # a plug-in of Hydra may raise anything
        if before == "1":
            raise
        tell(explained(error))
        sys.exit(WRONG_INPUT if isinstance(error, COMPOSE_ERRORS) else FAILED)
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ |= {FULL_ERROR: before} if before is not None else {}


def _alone(config: DictConfig) -> "Experiment":
    """Check the only job of a command, and write down its runs as planned. Raises ConfigError."""
    resolved = plain(config)
    from gradsurg.experiment.command import Command

    command = Command()
    experiment = command.add(HydraConfig.get().overrides.task, resolved)
    command.plan()
    return experiment


def _of_sweep(config: DictConfig) -> "Experiment":
    """Build a job of a sweep, which has been checked before the first job."""
    from gradsurg.effects.ledger import SurgeryWarning
    from gradsurg.experiment.build import build
    from gradsurg.experiment.command import with_shared_loggers

    with warnings.catch_warnings(), chdir(Path.cwd()):  # which a user's code may change
        warnings.simplefilter("ignore", SurgeryWarning)  # told by the check
        experiment = with_shared_loggers(build(plain(config), trial=False))
    settings = experiment.settings
    if settings.steps and not settings.dry_run and not experiment.is_finished:
        number = 1 + HydraConfig.get().job.num
        tell(f"job {number}: {printable(' '.join(HydraConfig.get().overrides.task))}")
        if not str(HydraConfig.get().launcher["_target_"]).endswith(".BasicLauncher"):
            for logger in experiment.loggers:
                logger.expect(None, number)
    return experiment


def _train(experiment: "Experiment", sweeping: bool) -> bool:
    """Train the runs of a job, and report on it unless it is one of a sweep.

    Return whether all runs have finished.
    """
    pairs = _tuned(experiment)
    if pairs is None:
        return False
    runs = [run for pair in pairs for run in pair.runs]
    attempted = [_run(experiment, run) for run in runs]
    records = [record for record in attempted if record is not None and record.summary]
    failed = len(runs) - len(records)
    if failed:
        tell(f"{failed} of {len(runs)} runs failed")
    for text in _unmeasured(records):
        tell(text)
    if not sweeping:
        _report(experiment, pairs, records)
    return not failed and not any(record.summary.get("nonfinite") for record in records)


def _tuned(experiment: "Experiment") -> "Sequence[Pair] | None":
    """Train the tuning runs that are not finished; return the runs to compare.

    None if a tuning run failed: a choice without it could be another one.
    """
    if experiment.tuning is None:
        return experiment.pairs
    tuning = experiment.tuning.runs
    failed = sum(_run(experiment, run) is None for run in tuning)
    pairs = experiment.compared
    if failed or pairs is None:
        tell(f"{failed} of {len(tuning)} tuning runs failed: nothing is chosen")
        return None
    experiment.tuning.write(experiment.settings)
    return pairs


def _run(experiment: "Experiment", run: "Run") -> "Record | None":
    """Execute one run and print what happened to it; return None if it failed."""
    from gradsurg.experiment.execution import execute
    from gradsurg.experiment.run_directory import ERROR
    from gradsurg.experiment.run_reader import BrokenFile

    settings = experiment.settings
    out = Path(settings.out)
    split = "" if run.split_seed is None else f", split {run.split_seed}"
    name = printable(f"{run.label}, seed {run.seed}{split}")
    try:
        with chdir(Path.cwd()):  # which a user's code may change
            record = execute(run, out, experiment.loggers, settings.threads, settings.retry_failed)
    except Exception as error:  # one line for whatever a run raises; the traceback is in a file
        log = run.directory(out) / ERROR
        hint = "the traceback could not be written"
        if log.is_file():
            hint = f"the traceback is in {os.path.relpath(log)}"
        if isinstance(error, BrokenFile):
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


def _report(experiment: "Experiment", pairs: "Sequence[Pair]", records: "Sequence[Record]") -> None:
    """Print the outcome of a single job, and write the report of its study."""
    from gradsurg.experiment.command import print_notes, report_study
    from gradsurg.report.terminal import Runs, failures, report
    from gradsurg.report.tuning import read_tunings, tuning_text

    settings = experiment.settings
    out = Path(settings.out)
    places = {record.run.name: record.directory for record in records}
    if experiment.tuning is not None:
        chosen = tuning_text(*read_tunings(experiment.tuning.write(settings)))
        print("\n".join(chosen), end="\n\n")
    if text := failures([run.directory(out) for pair in pairs for run in pair.runs]):
        print(f"{text}\n")
    if places:
        print(report([Runs(*_places(pair, places)) for pair in pairs]))
    if settings.report is not False:
        report_study(out / settings.study, experiment.loggers, settings.report is True)
    if skipped := sum(record.action == "skipped" for record in records):
        print(f"{skipped} of them had been finished before; force=true repeats them")
    print_notes(experiment.loggers)


def _places(pair: "Pair", places: dict[str, Path]) -> tuple[Path | None, Path | None, dict]:
    """Return the folders of the treated run, of the control, and of those without each link."""
    treated, control = (run and places.get(run.name) for run in (pair.treated, pair.control))
    return treated, control, {link: places.get(run.name) for link, run in pair.without.items()}


def _unmeasured(records: "Iterable[Record]") -> list[str]:
    """Return a line for each measurement that finished runs were trained without."""
    notes = Counter(record.note for record in records if record.action == "skipped" and record.note)
    return [
        f"{number} finished run{'s were' if number > 1 else ' was'} {note}: the same command with "
        f"force=true trains {'them' if number > 1 else 'it'} again"
        for note, number in notes.items()
    ]


def _list(words: list[str]) -> None:
    """Print the options of a config group, or the groups without one: `--list [GROUP] [--json]`."""
    parser = ArgumentParser(prog="python -m gradsurg.run", allow_abbrev=False)
    parser.add_argument("--list", metavar="GROUP", nargs="?", default="", const="")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    try:
        entries = gradsurg.list(arguments.list)
    except LookupError as error:
        raise ConfigError([f"--list: {error.args[0]}"]) from error
    if arguments.json:
        print(entries.json(), end="")
    elif arguments.list:
        print(entries.table())
    else:
        print(entries.overview())


if __name__ == "__main__":
    ignore_closed_pipes()
    main()
