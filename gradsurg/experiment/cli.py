"""Check every job of a command line before training, plan its runs, report on them after."""

import json
import os
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from math import sqrt
from pathlib import Path
from statistics import stdev

from omegaconf import DictConfig

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.effects.tables import aligned
from gradsurg.experiment import compose
from gradsurg.experiment.build import Experiment, build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.instantiate import Config
from gradsurg.experiment.overrides import MAX_RUNS, too_many
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import ERROR, RunDirectory, RunState, merged_facts
from gradsurg.experiment.run_identity import edited_modules
from gradsurg.experiment.run_reader import BrokenFile
from gradsurg.experiment.trial_step import step_seconds
from gradsurg.experiment.tuning import HEADLINE
from gradsurg.loggers.base import GuardedLogger
from gradsurg.plugins.messages import printable, tell, terminal_width
from gradsurg.stats import detectable_effect, seeds_needed

WRONG_INPUT = 2

ANNOUNCED_RUNS = 100  # more are announced with a time before they start
MIN_CONTROLS = 6  # finished control runs by whose spread an effect is told before training

WORST_FIRST: tuple[RunState, ...] = (
    "failed",
    "interrupted",
    "running",
    "planned",
    "diverged",
    "finished",
)

STATES: dict[RunState, str] = {
    "planned": "to train",
    "interrupted": "interrupted before, to resume",
    "failed": "failed before",
    "running": "running in another process",
    "diverged": "diverged before, skipped",
    "finished": "finished before, skipped",
}

_experiments: dict[str, Experiment] = {}
"""The experiments that `read_command` has built in this process and no job has taken yet."""


@dataclass(frozen=True)
class JobRun:
    """The directory of a run, and the facts and the identity to write into it."""

    path: Path
    facts: dict[str, object]
    identity: dict[str, object]


@dataclass(frozen=True)
class Job:
    """The overrides of one job, and its runs."""

    words: tuple[str, ...]
    runs: tuple[JobRun, ...]


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
        first = not (self.jobs or self.untrained or self.plans)
        self.trains |= not settings.dry_run
        if settings.dry_run:
            self.plans.append(experiment)
        elif first and settings.steps:
            _announce(experiment, num_jobs)
        if settings.steps == 0:
            self.untrained += 1
            return
        out = Path(settings.out)
        if experiment.tuning is not None:
            self.tuned[len(self.jobs)] = experiment
        self.jobs.append(planned_job(words, experiment.runs, out))
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
            jobs[number] = planned_job(jobs[number].words, experiment.runs, out)
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
        except ConfigError as error:
            for fault in error.faults:
                tell(fault)
            sys.exit(WRONG_INPUT)
    for text in dict.fromkeys(str(item.message) for item in caught):
        tell(f"warning: {text}")
    if arguments.cfg:
        return Command()
    if command.untrained:
        jobs = f"{command.untrained} job{'s' if command.untrained > 1 else ''}"
        print(f"steps=0: {jobs} checked, nothing to train")
    if command.plans:
        return Command() if command.trains else Command(plans=command.plans)
    if command.untrained and not command.jobs:
        sys.exit()
    for text in dict.fromkeys(filter(None, map(_edited, command.jobs))):
        tell(text)
    power = _power([*_experiments.values()])
    try:
        states = plan_runs(command.jobs, command.force)
    except OSError as error:
        tell(f"out: cannot be written to: {error}")
        sys.exit(WRONG_INPUT)
    each = " in each job" if len(command.tuned) > 1 else ""
    for text in dict.fromkeys(map(_budget, command.tuned.values())):
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


def planned_job(words: Sequence[str], runs: Iterable[Run], out: Path) -> Job:
    """Return a job with the directories of its runs, without models and data."""
    command = {"command": list(words)}
    planned = (JobRun(run.directory(out), run.facts | command, run.identity) for run in runs)
    return Job(tuple(words), tuple(planned))


def plan_runs(jobs: Sequence[Job], force: bool) -> Counter[RunState]:
    """Write down each run once as planned, and return how many runs are in each state.

    With `force` the files of earlier runs are removed here, once: two jobs may share a control, and
    a job that is started again on another machine must resume from its checkpoint. A run that is
    new has the number of finished runs of its arm as `looked`, if there are some.
    """
    states: Counter[RunState] = Counter()
    runs = _distinct_runs(jobs)
    ended = {run.path for run in runs if not force and RunDirectory(run.path).finished}
    arms = {run.path: (run.path.parent, _arm(run.identity)) for run in runs}  # tunings apart
    looked = Counter(arms[path] for path in ended)
    for run in runs:
        directory = RunDirectory(run.path)
        state: RunState
        if run.path in ended:
            state = directory.recorded_state
            with suppress(BrokenFile):  # the job tells it, the other runs go on
                directory.add_facts(run.facts)
        else:
            try:
                state = _planned(run, directory, force, looked[arms[run.path]])
            except BrokenFile:  # as above
                state = "failed"
        states[state] += 1
    return states


def _edited(job: Job) -> str:
    """A line if a job's first run was trained before with other source of a user's modules."""
    run = next((run for run in job.runs if run.identity["sources"]), None)
    if run is None or run.path.exists():
        return ""
    stem = escape(run.path.name.rpartition("-")[0])
    for path in sorted(run.path.parent.glob(f"{stem}-{'[0-9a-f]' * 8}")):
        with suppress(BrokenFile):
            before = RunDirectory(path).read_config()
            if before and (modules := edited_modules(before, run.identity)):
                files = ", ".join(dict.fromkeys(map(_file_of, modules)))
                return f"{files}: edited since {path.name} was trained; trained anew beside it"
    return ""


def _file_of(name: str) -> str:
    """Return the file of a module, or of the module of a dotted path; the name without one."""
    for module in (name, name.rpartition(".")[0]):
        if file := getattr(sys.modules.get(module), "__file__", None):
            return printable(os.path.relpath(file))
    return name


def _planned(run: JobRun, directory: RunDirectory, force: bool, looked: int) -> RunState:
    """Write down one run as planned and return its state before that."""
    with directory.lock(wait=force) as alone:
        if not alone:
            return "running"
        before = directory.known_facts()
        facts = merged_facts(before, run.facts)
        if looked and not before:
            facts["looked"] = looked
        if force:
            directory.clear()
        state = directory.recorded_state
        directory.plan(facts, run.identity)
    return state


def summary_line(num_jobs: int, states: Counter[RunState], retry_failed: bool) -> str:
    """Return one line with the number of jobs, and of runs in each state."""
    failed = "tried again" if retry_failed else "not retried (retry_failed=false)"
    counts = [
        f"{count} {STATES[state]}{f', {failed}' if state == 'failed' else ''}"
        for state, count in states.items()
    ]
    jobs = f"{num_jobs} job{'s' if num_jobs > 1 else ''}"
    return f"{jobs}, {states.total()} runs: {'; '.join(counts)}"


def outcome_table(jobs: Sequence[Job]) -> tuple[str, bool]:
    """Return a table with the state of each job, and whether all runs have finished."""
    varying = _varying_keys(jobs)
    rows = [["job", "state", "reason"]]
    all_finished = True
    for job in jobs:
        words = " ".join(word for word in job.words if word.partition("=")[0] in varying)
        state, reason = _outcome(job)
        all_finished &= state == "finished"
        rows.append([printable(words) or "(the only one)", state, printable(reason)])
    width = terminal_width(sys.stdout)
    return aligned(rows, (0, 2), *([width] if width else [])), all_finished


def _check(arguments: Namespace, command: Command) -> None:
    name = arguments.config_name or "config"
    folders = [arguments.config_dir] if arguments.config_dir else []
    words, command.sweeping = compose.expand_study(
        arguments.overrides, arguments.multirun, folders, name
    )
    compose.check(words, command.sweeping, folders, name, command.add, builds=not arguments.cfg)


def _announce(experiment: Experiment, num_jobs: int) -> None:
    """Print the number of runs of many jobs or of several splits, and about how long they take.

    Raises ConfigError if there are very many runs without `yes`.
    """
    settings = experiment.settings
    runs = [run for pair in experiment.pairs for run in pair.runs]
    tuned = experiment.tuning.runs if experiment.tuning else []
    count = num_jobs * (len(runs) + len(tuned))
    if count > MAX_RUNS and not settings.yes:
        raise ConfigError([f"sweep: {too_many(count, 'runs')}"])
    if count > ANNOUNCED_RUNS or (settings.splits > 1 and not experiment.is_finished):
        seconds = count * settings.steps * settings.accumulate * step_seconds(runs[0])
        text = f"{count:,} runs of {settings.steps:,} steps"
        if num_jobs > 1:
            text = f"{num_jobs:,} jobs, {text}"
        elif settings.splits > 1:
            seeds, arms = len(settings.all_seeds), len(experiment.pairs[0].runs)
            text += f" ({seeds} seeds x {settings.splits} splits x {arms} arms)"
        tell(f"{text}: about {_duration(seconds)} on {runs[0].device}, by a step without surgery")


def _power(experiments: Sequence[Experiment]) -> str:
    """Return a line if the seeds or splits of a command are too few for its arms, else one with the
    difference that they can find; empty if nothing is compared or known.
    """
    pairs = [pair for experiment in experiments for pair in experiment.pairs]
    treated = [pair.treated for pair in pairs if pair.treated and pair.treated.controls]
    seeds = {run.seed for run in treated}
    splits = {_task_of(run.identity).get("split_seed") for run in treated}
    n, unit = (len(splits), "splits") if len(splits) > 1 else (len(seeds), "seeds")
    if n < 2:
        return ""
    if n < (least := seeds_needed(1)):
        rule = "no difference can be significant (p <= 0.05)"
        return f"{n} {unit}: {rule}; {unit}={least} are the fewest that allow it"
    arms = len({_arm(run.identity, "model", "task") for run in treated})
    if arms < len({_arm(run.identity) for run in treated}):  # of several models or tasks
        return ""
    if n < (least := seeds_needed(arms)):
        rule = f"an arm that differs alone needs {unit}={least} to be significant (q <= 0.05)"
        return f"{arms} arms with {n} {unit}: {rule}"
    return _detectable(experiments[0], n) if unit == "seeds" else ""


def _detectable(experiment: Experiment, seeds: int) -> str:
    """Return a line with the difference that so many seeds can find, by the finished controls."""
    out = Path(experiment.settings.out)
    controls = {pair.control.name: pair.control for pair in experiment.pairs if pair.control}
    directories = [RunDirectory(run.directory(out)) for run in controls.values()]
    ended = [each.read_summary() for each in directories if each.finished]
    ended = [summary for summary in ended if summary["state"] == "finished"]
    headline = [f"test/{name}" for name in HEADLINE if any(f"test/{name}" in one for one in ended)]
    metric = experiment.settings.metric or next(iter(headline), "")
    found = [summary.get(metric) for summary in ended]
    values = [float(value) for value in found if isinstance(value, int | float)]
    if len(values) < MIN_CONTROLS or len(set(values)) == 1:
        return ""
    effect = detectable_effect(seeds, sqrt(2) * stdev(values))
    assert effect is not None  # as there are enough seeds for the test
    share = metric.rpartition("/")[2].startswith("accuracy")
    size = f"{100 * effect:.2g} pp" if share else f"{effect:.2g}"
    return (
        f"{seeds} seeds can find a difference of {size} in {metric.replace('/', ' ')} (80 % power, "
        f"from the spread of {len(values)} control runs)"
    )


def _arm(identity: Mapping[str, object], *groups: str) -> str:
    """Return a text that is equal for the runs of one arm, whatever the seed, split and groups."""
    task = {**_task_of(identity), "split_seed": None}
    same = {**identity, "task": task, **dict.fromkeys(("seed", *groups))}
    return json.dumps(same, sort_keys=True, default=repr)


def _task_of(identity: Mapping[str, object]) -> Mapping[str, object]:
    task = identity["task"]
    assert isinstance(task, Mapping)
    return task


def _budget(experiment: Experiment) -> str:
    """Return the number of runs of an experiment with tuning."""
    assert experiment.tuning is not None
    return experiment.tuning.budget(experiment.settings.all_seeds)


def _duration(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _key(config: Config) -> str:
    """Return the text by which a resolved config is found again."""
    return json.dumps(config, default=repr)


def _outcome(job: Job) -> tuple[str, str]:
    """Return the worst state among the runs of a job, and the reason of the first run in that
    state."""
    states = [RunDirectory(run.path).state for run in job.runs]
    worst = min(states, key=WORST_FIRST.index)
    count = states.count(worst)
    state = worst if count == len(states) else f"{count} of {len(states)} runs {worst}"
    if worst == "finished":
        return worst, ""
    first = RunDirectory(job.runs[states.index(worst)].path)
    if worst == "failed":
        return state, f"{first.reason} ({os.path.relpath(first.path / ERROR)})"
    summary = first.read_summary() if worst == "diverged" else {}
    made = summary.get("nonfinite")
    if isinstance(made, dict):
        return state, (
            f"{os.path.relpath(first.path)}: {made['transform']} returned NaN or infinity for a "
            f"finite gradient at site '{made['site']}', step {made['step']}"
        )
    step = summary.get("diverged_step")
    if step is not None:
        return state, f"{os.path.relpath(first.path)}: the loss of step {step} was not finite"
    return state, os.path.relpath(first.path)


def _distinct_runs(jobs: Sequence[Job]) -> list[JobRun]:
    """Return each run once, with the controls that it has in any of the jobs."""
    runs: dict[Path, JobRun] = {}
    for run in (run for job in jobs for run in job.runs):
        facts = runs[run.path].facts if run.path in runs else {}
        runs[run.path] = replace(run, facts=merged_facts(facts, run.facts))
    return list(runs.values())


def _varying_keys(jobs: Sequence[Job]) -> set[str]:
    """Return the keys that have more than one value among the jobs."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for word in job.words:
            values.setdefault(word.partition("=")[0], set()).add(word)
    return {key for key, words in values.items() if len(words) > 1}
