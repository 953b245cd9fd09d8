"""Check every job of a command line before training, plan its runs, report on them after."""

import json
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment import compose
from gradsurg.experiment.build import Experiment, build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.instantiate import Config
from gradsurg.experiment.planning import (
    Job,
    announce,
    edited_lines,
    plan_runs,
    power_line,
    summary_line,
)
from gradsurg.loggers.base import GuardedLogger
from gradsurg.plugins.messages import tell

WRONG_INPUT = 2

_experiments: dict[str, Experiment] = {}
"""The experiments that `read_command` has built in this process and no job has taken yet."""


@dataclass
class Command:
    """The checked jobs of a command line; `jobs` is empty if the command asks for a config or a
    job is a dry run.

    `plans` are the experiments of a command with dry runs alone.
    """

    sweeping: bool = False
    jobs: list[Job] = field(default_factory=list)
    loggers: dict[str, GuardedLogger] = field(default_factory=dict)  # by their configs
    studies: dict[Path, dict[str, GuardedLogger]] = field(
        default_factory=dict
    )  # with their loggers
    report: bool = True
    force: bool = False
    retry_failed: bool = True
    plans: list[Experiment] = field(default_factory=list)
    trains: bool = False  # whether a job is no dry run
    untrained: int = 0  # the number of jobs with steps=0
    tuned: dict[int, Experiment] = field(default_factory=dict)  # by the number of the job
    has_new_runs: bool = True
    num_unfinished: int = 0

    def add(self, words: list[str], experiment: Experiment, num_jobs: int) -> None:
        """Add a job that has no error, one of `num_jobs`."""
        settings = experiment.settings
        self.trains |= not settings.dry_run
        if settings.dry_run:
            self.plans.append(experiment)
        if settings.steps == 0:
            self.untrained += 1
            return
        out = Path(settings.out)
        if experiment.tuning is not None:
            self.tuned[len(self.jobs)] = experiment
        self.jobs.append(Job(words, experiment.runs, out))
        study_loggers = self.studies.setdefault(out / settings.study, {})
        for logger in experiment.loggers:
            study_loggers[logger.key] = self.loggers.setdefault(logger.key, logger)
        loggers = tuple(self.loggers[logger.key] for logger in experiment.loggers)
        _experiments[_key(experiment.config)] = replace(experiment, loggers=loggers)
        self.report &= settings.report is not False
        self.force |= settings.force
        self.retry_failed &= settings.retry_failed

    def chosen(self) -> list[Job]:
        """Return the jobs, those with a tuning with the runs that it has chosen."""
        jobs = list(self.jobs)
        for number, experiment in self.tuned.items():
            out = Path(experiment.settings.out)
            jobs[number] = Job(jobs[number].words, experiment.runs, out)
        return jobs


def read_command(arguments: Namespace) -> Command:
    """Check all jobs of a command line, and write down their runs as planned.

    Exits with code 2 after printing all errors. Prints the warnings of the surgery, each once.
    """
    _experiments.clear()
    command = Command()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SurgeryWarning)
        try:
            _check(arguments, command)
            if _experiments and not command.plans:
                announce([*_experiments.values()])
        except ConfigError as error:
            for fault in error.faults:
                tell(fault)
            sys.exit(WRONG_INPUT)
    for text in dict.fromkeys(str(item.message) for item in caught):
        tell(f"warning: {text}")
    if arguments.cfg:
        return Command()
    if command.untrained:
        # A trial step would import PyTorch's compiler, which takes longer than the check.
        jobs = f"{command.untrained} job{'s' if command.untrained > 1 else ''}"
        print(f"steps=0: {jobs} checked without a trial step, nothing to train")
    if command.plans:
        return Command() if command.trains else Command(plans=command.plans)
    if command.untrained and not command.jobs:
        sys.exit()
    for text in edited_lines(command.jobs):
        tell(text)
    power = power_line([*_experiments.values()])
    try:
        states = plan_runs(command.jobs, command.force)
    except OSError as error:
        tell(f"out: cannot be written to: {error}")
        sys.exit(WRONG_INPUT)
    each = " in each job" if len(command.tuned) > 1 else ""
    tuned = [(one.tuning, one.settings.all_seeds) for one in command.tuned.values()]
    for text in dict.fromkeys(tuning.budget(seeds) for tuning, seeds in tuned if tuning):
        tell(f"tuning{each}: {text}")
    command.has_new_runs = set(states) != {"finished"}
    command.num_unfinished = states.total() - states["finished"] - states["diverged"]
    if power and command.num_unfinished:
        tell(power)
    if command.sweeping:
        tell(summary_line(len(command.jobs), states, command.retry_failed))
    return command


def checked_experiment(config: DictConfig) -> Experiment:
    """Return the experiment of a job: the one that was built when the command line was checked.

    The process of a launcher, which has not read the command line, builds it here.
    """
    resolved = compose.plain(config)
    experiment = _experiments.pop(_key(resolved), None)
    if experiment is not None:
        return experiment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # `read_command` has printed them
        return build(resolved)


def experiments_to_stack() -> list[list[Experiment]]:
    """Return the experiments of jobs whose runs may be replicas of common stacks, in groups.

    Their jobs do not stack again: runs that no stack takes are trained one by one.
    """
    groups: dict[tuple[object, ...], list[Experiment]] = {}
    for key, experiment in _experiments.items():
        settings = experiment.settings
        if settings.runner == "sequential" or experiment.tuning is not None:
            continue
        loggers = tuple(logger.key for logger in experiment.loggers)
        shared = (settings.runner, settings.out, settings.study, settings.threads)
        groups.setdefault((*shared, settings.retry_failed, *loggers), []).append(experiment)
        single = replace(settings, runner="sequential")
        _experiments[key] = replace(experiment, settings=single)
    return list(groups.values())


def _check(arguments: Namespace, command: Command) -> None:
    name = arguments.config_name or "config"
    folders = [arguments.config_dir] if arguments.config_dir else []
    words, command.sweeping = compose.expand_study(
        arguments.overrides, arguments.multirun, folders, name
    )
    compose.check(words, command.sweeping, folders, name, command.add, builds=not arguments.cfg)


def _key(config: Config) -> str:
    """Return the text by which a resolved config is found again."""
    return json.dumps(config, default=repr)
