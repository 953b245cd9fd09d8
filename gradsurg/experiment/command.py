"""The checked jobs of a command line: planned before training, reported on after it."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment.build import build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.planning import (
    Job,
    announce,
    edited_lines,
    outcome_table,
    plan_runs,
    summary_line,
)
from gradsurg.experiment.power import power_lines
from gradsurg.experiment.run_directory import LOCK, TUNING, remove_leftovers
from gradsurg.experiment.run_reader import ForeignLink, inside
from gradsurg.experiment.runs import Experiment
from gradsurg.loggers.base import GuardedLogger, Logger, ProgressLogger
from gradsurg.loggers.console import Console
from gradsurg.plugins.messages import printable, tell

_loggers: dict[str, GuardedLogger] = {}
"""The loggers of this process, by `key` (their config): the jobs of a sweep share them."""


@dataclass
class Command:
    """The jobs of one command line; `jobs` has no dry runs and no jobs with steps=0."""

    sweeping: bool = False
    search: Mapping[str, object] | None = None  # of the trial of a search: its metric
    jobs: list[Job] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)  # one for each of `jobs`
    dry: list[tuple[list[str], Experiment]] = field(default_factory=list)  # with dry_run=true
    num_untrained: int = 0  # the number of jobs with steps=0
    num_unfinished: int = 0
    has_new_runs: bool = False
    _told: set[str] = field(default_factory=set)  # warnings, each printed once

    def __post_init__(self) -> None:
        _loggers.clear()

    def add(self, words: Iterable[str], config: Mapping[str, Any]) -> Experiment:  # Any: any YAML
        """Build the experiment of a job and try a training step. Raises ConfigError."""
        with _told_warnings(self._told), chdir(Path.cwd()):  # undoes an os.chdir of a user's code
            experiment = with_shared_loggers(build(config))
        settings = experiment.settings
        if settings.dry_run:
            self.dry.append(([*words], experiment))
        if settings.steps == 0:
            self.num_untrained += 1
        elif not settings.dry_run:
            self.jobs.append(Job([*words], experiment.runs, settings.out_folder))
            self.experiments.append(experiment)
        return experiment

    def plan(self) -> None:
        """Print what will be trained, and record each run as planned. Raises ConfigError.

        Of a dry run the plan of its hooks is printed, and nothing is recorded.
        """
        for number, (words, experiment) in enumerate(self.dry, 1):
            if self.sweeping:
                print(f"job {number}: {printable(' '.join(words))}")
            with chdir(Path.cwd()):
                model, example = experiment.make_model(), experiment.example_input
                print(experiment.surgery.plan(model, example), end="\n\n" * self.sweeping or "\n")
        if self.num_untrained:
            jobs = f"{self.num_untrained} job{'s' if self.num_untrained > 1 else ''}"
            print(f"steps=0: {jobs} checked, nothing to train")
        if not self.jobs:
            return
        announce(self.experiments)
        for text in edited_lines(self.jobs):
            tell(text)
        power = [] if self.search else power_lines(self.experiments)
        force = any(each.settings.force for each in self.experiments)
        try:
            for each in self.experiments:
                if each.tuning is not None:
                    inside(each.settings.study_folder / TUNING / LOCK)
        except ForeignLink as error:
            raise ConfigError([f"study: {error}"]) from error
        for folder in self._studies():
            remove_leftovers(folder)
        try:
            states = plan_runs(self.jobs, force, self.search)
        except OSError as error:
            raise ConfigError([f"out: cannot be written to: {error}"]) from error
        tuned = [
            each.tuning.budget(each.settings.all_seeds)
            for each in self.experiments
            if each.tuning is not None
        ]
        for text in dict.fromkeys(tuned):
            tell(f"tuning{' in each job' if len(tuned) > 1 else ''}: {text}")
        self.has_new_runs = set(states) != {"finished"}
        self.num_unfinished = states.total() - states["finished"] - states["diverged"]
        for text in power if self.num_unfinished else ():
            tell(text)
        if self.sweeping:
            retry = all(each.settings.retry_failed for each in self.experiments)
            tell(summary_line(len(self.jobs), states, retry))
        for logger in _loggers.values():
            logger.expect(self.num_unfinished)

    def report(self) -> bool:
        """Print the outcome of all jobs, report on each study; return whether all runs finished."""
        from gradsurg.report.study import read_study
        from gradsurg.report.terminal import overview

        jobs = zip(self.jobs, self.experiments, strict=True)
        # The choice of a tuning is known now.
        table, all_finished = outcome_table([replace(job, runs=own.runs) for job, own in jobs])
        if self.has_new_runs:
            print(table)
        wants_report = all(each.settings.report is not False for each in self.experiments)
        for folder, loggers in self._studies().items():
            print(f"\nstudy {folder.name}:")
            with only_trials_told():
                print(overview(read_study(folder)))
                if wants_report:
                    report_study(folder, loggers, figures=True)
        print_notes(_loggers.values())
        return all_finished

    def _studies(self) -> dict[Path, list[GuardedLogger]]:
        """Return the folder of each study with the loggers of its jobs, each once."""
        studies: dict[Path, dict[str, GuardedLogger]] = {}
        for experiment in self.experiments:
            loggers = studies.setdefault(experiment.settings.study_folder, {})
            loggers |= {logger.key: logger for logger in experiment.loggers}
        return {folder: [*loggers.values()] for folder, loggers in studies.items()}


def with_shared_loggers(experiment: Experiment) -> Experiment:
    """Return the experiment with the loggers that earlier jobs of this process have made.

    If none of them shows progress, for example with `logger=none`, a Console that does is added.
    """
    loggers = experiment.loggers
    if not any(isinstance(each.logger, ProgressLogger) for each in loggers):
        loggers = (*loggers, GuardedLogger(Console(lines=False), "progress"))
    shared = (_loggers.setdefault(logger.key, logger) for logger in loggers)
    return replace(experiment, loggers=tuple(shared))


@contextmanager
def only_trials_told() -> Iterator[None]:
    """Print the message of a NotAStudy: a report raises it if all runs are trials of a search."""
    from gradsurg.report.load import NotAStudy

    try:
        yield
    except NotAStudy as error:
        tell(str(error))


def report_study(folder: Path, loggers: Iterable[GuardedLogger], figures: bool) -> None:
    """Write the report of a study, print its path, and send the study to the loggers.

    Drawing figures can take as long as training: without `figures` they are drawn only if an
    earlier report has some. The loggers get the study even if no run is new, because an earlier
    command may have been killed before it sent it.
    """
    from gradsurg.report.export import figures_in, study_info, write_report
    from gradsurg.report.study import read_study

    study, out = read_study(folder), folder / "report"
    try:
        page = write_report(study, out, figures=figures or bool(figures_in(out)))
    except OSError as error:
        tell(f"the report cannot be written: {error}")
        return
    print(f"report: {printable(os.path.relpath(page))}")
    info = study_info(study, out)
    for logger in loggers if info.rows else ():  # plain runs alone have no table
        logger.study(info)


def print_notes(loggers: Iterable[Logger]) -> None:
    """Print the closing notes of the loggers, each line once."""
    for note in dict.fromkeys(note for logger in loggers for note in logger.notes()):
        print(note)


@contextmanager
def _told_warnings(told: set[str]) -> Iterator[None]:
    """Print the SurgeryWarnings that are raised in a block and not yet `told`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SurgeryWarning)
        yield
    for text in dict.fromkeys(str(item.message) for item in caught):
        if text not in told:
            told.add(text)
            tell(f"warning: {text}")
