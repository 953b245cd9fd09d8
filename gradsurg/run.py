"""Train an experiment from the command line: python -m gradsurg.run transform=clip.

Modules that import torch are imported in functions: help does without them.
"""

import os
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import hydra
import hydra._internal.utils as hydra_utils
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import gradsurg
from gradsurg.experiment import overrides
from gradsurg.plugins.messages import full_message, printable, tell
from gradsurg.plugins.pipes import ignore_closed_pipes

if TYPE_CHECKING:
    from gradsurg.experiment.build import Experiment
    from gradsurg.experiment.cli import Command
    from gradsurg.experiment.execution import Record
    from gradsurg.experiment.run import Run
    from gradsurg.experiment.runs import Pair
    from gradsurg.loggers.base import GuardedLogger, Logger
    from gradsurg.report.study import Study

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
TUNE = re.compile(r"tune=(?!null$)([^'\"].*)", re.DOTALL)
HAPPENED = {
    "resumed": "was interrupted, resumed from its checkpoint",
    "retried": "failed before, tried again",
}


def main() -> None:
    """Run the command; under torchrun the other processes train with the first, which runs it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _command()
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported
    from gradsurg.experiment.execution import follow
    from gradsurg.experiment.processes import run_in_all

    run_in_all(_command, follow)


def _command() -> None:
    """Check the whole command line, let Hydra run its jobs, and report on a sweep.

    The exit code is 0 if all runs finished, 1 if a run failed or, in a sweep, diverged, 2 if the
    command line is wrong, 130 after an interruption.
    """
    try:
        if any(word.partition("=")[0] == "--list" for word in sys.argv[1:]):
            _list(sys.argv[1:])
            return
        _refuse_dashes(sys.argv[1:])
        _refuse_ranks(sys.argv[1:])
        sys.argv[1:] = _options_first(sys.argv[1:])
        arguments = hydra_utils.get_args_parser().parse_args()
        overrides.register()
        if arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion:
            _run_hydra()
            return
        _refuse_launchers(arguments)
        _check_names(arguments)
        from gradsurg.experiment.cli import read_command

        command = read_command(arguments)
        for experiment in command.plans:
            _in_one_line(lambda experiment=experiment: _print_plan(experiment))
        if command.plans:
            return
        sweeping = command.sweeping and bool(command.jobs)
        for logger in command.loggers.values():
            logger.expect(command.num_unfinished)
        broken = False
        try:
            # Hydra writes into the folder of a sweep, which may be read-only.
            if not sweeping or command.num_unfinished:
                if sweeping and not any("hydra/launcher=" in word for word in arguments.overrides):
                    _stack_jobs()
                _run_hydra()
        except SystemExit as end:
            if not sweeping or end.code == WRONG_INPUT:
                raise
            broken = True  # report on all jobs of the sweep first
        if sweeping and (not _report_sweep(command) or broken):
            sys.exit(FAILED)
    except KeyboardInterrupt:
        tell("interrupted; the same command resumes from the last checkpoint")
        sys.exit(INTERRUPTED)


def _check_names(arguments: Namespace) -> None:
    """Exit if an option or a key does not exist, before torch is imported, which takes seconds."""
    from gradsurg.experiment.compose import check_names
    from gradsurg.experiment.errors import ConfigError

    folders = [arguments.config_dir] if arguments.config_dir else []
    name = arguments.config_name or "config"
    try:
        check_names(arguments.overrides, arguments.multirun, folders, name)
    except ConfigError as error:
        tell("\n".join(error.faults))
        sys.exit(WRONG_INPUT)


@hydra.main(config_path=str(overrides.CONFIG_DIR), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Run one job: all seeds of one config, treated and control."""
    from gradsurg.experiment.cli import checked_experiment
    from gradsurg.report.terminal import Runs, failures, report
    from gradsurg.report.tuning import read_tunings, tuning_text

    experiment = checked_experiment(config)
    if experiment.settings.dry_run:
        _print_plan(experiment)
        return
    if not experiment.settings.steps:
        return  # `read_command` has printed that nothing is trained
    sweeping = HydraConfig.get().mode is RunMode.MULTIRUN
    if sweeping and not experiment.is_finished:
        words = " ".join(HydraConfig.get().overrides.task)
        number = 1 + HydraConfig.get().job.num
        tell(f"job {number}: {printable(words)}")
        if not str(HydraConfig.get().launcher["_target_"]).endswith(".BasicLauncher"):
            for logger in experiment.loggers:
                logger.expect(None, number)
    pairs = _tuned(experiment)
    if pairs is None and sweeping:
        return
    if pairs is None:
        sys.exit(FAILED)
    runs, skipped, wanted, failed = [], 0, 0, 0
    records: list[Record] = []
    stacked = _stacked(experiment, [run for pair in pairs for run in pair.runs])
    for pair in pairs:
        attempted = [_run(experiment, run, stacked) for run in pair.runs]
        done = [record for record in attempted if record and record.summary]
        directories = {record.run.name: record.directory for record in done}
        treated, control = (
            run and directories.get(run.name) for run in (pair.treated, pair.control)
        )
        without = {link: directories.get(run.name) for link, run in pair.without.items()}
        runs.append(Runs(treated, control, without))
        skipped += sum(record.action == "skipped" for record in done)
        wanted += len(pair.runs)
        failed += len(pair.runs) - len(done)
        records += done
    if failed:
        tell(f"{failed} of {wanted} runs failed")
    for text in _unmeasured(records):
        tell(text)
    if sweeping:
        return  # `main` reports on all jobs together
    if experiment.tuning is not None:
        chosen = tuning_text(*read_tunings(experiment.tuning.write(experiment.settings)))
        print("\n".join(chosen), end="\n\n")
    if text := failures(
        [run.directory(Path(experiment.settings.out)) for pair in pairs for run in pair.runs]
    ):
        print(f"{text}\n")
    if any(run.treated or run.control for run in runs):
        print(report(runs))
    if experiment.settings.report is not False:
        _report_job(experiment)
    if skipped:
        print(f"{skipped} of them had been finished before; force=true repeats them")
    _print_notes(experiment.loggers)
    if failed or any(record.summary.get("nonfinite") for record in records):
        sys.exit(FAILED)


def _refuse_dashes(words: list[str]) -> None:
    """Exit if a key is written as an option: `--seeds 3` for `seeds=3`."""
    keys = {*overrides.GROUPS, *OmegaConf.load(overrides.CONFIG_DIR / "config.yaml")}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        key, _, given = word.removeprefix("--").partition("=")
        if word.startswith("--") and key in keys:
            tell(f"{word}: is a key, written {key}={given or value}")
            sys.exit(WRONG_INPUT)


def _refuse_ranks(words: list[str]) -> None:
    """Exit if a number of processes is given as a key, with the command that starts them."""
    for word in words:
        key, _, count = word.lstrip("+").partition("=")
        if key == "ranks":
            rest = shlex.join(other for other in words if other != word)
            tell(
                "ranks: is no key, torchrun starts the processes: torchrun --nproc_per_node="
                f"{count or 2} -m gradsurg.run {rest}"
            )
            sys.exit(WRONG_INPUT)


def _refuse_launchers(arguments: Namespace) -> None:
    """Exit if jobs would be started elsewhere, in an environment that is that of torchrun."""
    for word in arguments.overrides:
        key, _, name = word.partition("=")
        if key == "hydra/launcher" and name != "basic" and "RANK" in os.environ:
            rule = "starts processes of its own, which cannot be those of torchrun: leave out one"
            tell(f"hydra/launcher: {name} {rule} of both")
            sys.exit(WRONG_INPUT)


def _list(words: list[str]) -> None:
    """Print the options of a config group, or the groups without one: `--list [GROUP] [--json]`."""
    parser = ArgumentParser(prog="python -m gradsurg.run", allow_abbrev=False)
    parser.add_argument("--list", metavar="GROUP", nargs="?", default="", const="")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    try:
        entries = gradsurg.list(arguments.list)
    except LookupError as error:
        tell(f"--list: {error.args[0]}")
        sys.exit(WRONG_INPUT)
    if arguments.json:
        print(entries.json(), end="")
    elif arguments.list:
        print(entries.table())
    else:
        print(entries.overview())


def _tuned(experiment: "Experiment") -> "Sequence[Pair] | None":
    """Train the tuning runs that are not finished; return the runs to compare.

    None if a tuning run failed: a choice without it could be another one.
    """
    if experiment.tuning is None:
        return experiment.pairs
    tuning = experiment.tuning.runs
    stacked = _stacked(experiment, tuning)
    failed = sum(_run(experiment, run, stacked) is None for run in tuning)
    pairs = experiment.compared
    if failed or pairs is None:
        tell(f"{failed} of {len(tuning)} tuning runs failed: nothing is chosen")
        return None
    experiment.tuning.write(experiment.settings)
    return pairs


def _options_first(words: list[str]) -> list[str]:
    """Put overrides behind options: the parser reads overrides in one piece only.

    The value of `tune` is quoted, or Hydra would read its commas as those of a sweep.
    """
    try:
        words = overrides.without_expressions(words)
    except ValueError as error:
        tell(error)
        sys.exit(WRONG_INPUT)
    words = [TUNE.sub(r'tune="\1"', word) for word in words]
    behind = [word for word in words if "=" in word and not word.startswith("-")]
    return [word for word in words if word not in behind] + behind


def _run_hydra() -> None:
    """Let Hydra answer the command line, which may mean to run jobs."""
    # Help asks for options a hundred times, and each time Hydra copies this singleton.
    shared = patch.object(ConfigStore, "__deepcopy__", lambda store, _: store, create=True)
    # `read_command` has composed every job of a sweep.
    valid = patch.object(Sweeper, "validate_batch_is_legal", lambda sweeper, batch: None)
    with shared, valid, patch.object(hydra_utils, "run_and_report", _in_one_line):
        _in_one_line(job)


def _in_one_line(call: Callable[[], object]) -> object:
    """Call a function; print an exception of Hydra or of a launcher on one line and exit."""
    try:
        return call()
    except Exception as error:  # plug-ins of Hydra may raise anything
        if hydra_utils._is_env_set("HYDRA_FULL_ERROR"):
            raise
        tell(f"hydra: {full_message(error)}; HYDRA_FULL_ERROR=1 shows where")
        wrong = isinstance(error, HydraException | OmegaConfBaseException | OSError | ValueError)
        sys.exit(WRONG_INPUT if wrong else FAILED)


def _print_plan(experiment: "Experiment") -> None:
    print(experiment.surgery.plan(experiment.make_model(), experiment.example_input))


def _stack_jobs() -> None:
    """Train the runs of all jobs of a sweep in stacks, where `runner` asks for it."""
    from gradsurg.experiment.cli import experiments_to_stack

    for experiments in experiments_to_stack():
        runs = [run for experiment in experiments for pair in experiment.pairs for run in pair.runs]
        _stacked(experiments[0], runs)


def _stacked(experiment: "Experiment", runs: "Sequence[Run]") -> "Mapping[str, Record]":
    """Train runs in stacks with `runner=stacked`; return the records by name."""
    settings = experiment.settings
    if settings.runner == "sequential":
        return {}
    from gradsurg.stacked.study import execute_stacked

    with chdir(Path.cwd()):  # which a user's code may change
        return execute_stacked(
            runs,
            Path(settings.out),
            experiment.loggers,
            settings.threads,
            settings.retry_failed,
            tell=lambda text: tell(printable(f"runner=stacked: {text}")),
        )


def _run(experiment: "Experiment", run: "Run", stacked: "Mapping[str, Record]") -> "Record | None":
    """Execute one run unless a stack has trained it, and print what happened to it; return None if
    it failed.
    """
    from gradsurg.experiment.execution import execute
    from gradsurg.experiment.run_directory import ERROR
    from gradsurg.experiment.run_reader import BrokenFile

    settings = experiment.settings
    out = Path(settings.out)
    split = "" if run.split_seed is None else f", split {run.split_seed}"
    name = printable(f"{run.label}, seed {run.seed}{split}")
    try:
        with chdir(Path.cwd()):  # which a user's code may change
            record = stacked.get(run.name) or execute(
                run, out, experiment.loggers, settings.threads, settings.retry_failed
            )
    except Exception as error:  # one line for whatever a run raises; the traceback is in a file
        if hydra_utils._is_env_set("HYDRA_FULL_ERROR"):
            raise
        log = run.directory(out) / ERROR
        hint = "HYDRA_FULL_ERROR=1 shows the traceback"
        if log.is_file():  # else it could not be written
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


def _unmeasured(records: "Sequence[Record]") -> list[str]:
    """Return a line for each measurement that finished runs were trained without."""
    notes = Counter(record.note for record in records if record.action == "skipped" and record.note)
    return [
        f"{number} finished run{'s were' if number > 1 else ' was'} {note}: the same command with "
        f"force=true trains {'them' if number > 1 else 'it'} again"
        for note, number in notes.items()
    ]


def _report_sweep(command: "Command") -> bool:
    """Print the outcome of all jobs and report on each study; return whether all runs finished."""
    from gradsurg.experiment.cli import outcome_table
    from gradsurg.report.study import read_study
    from gradsurg.report.terminal import overview

    table, all_finished = outcome_table(command.chosen())
    if command.has_new_runs:
        print(table)
    for folder, loggers in command.studies.items():
        study = read_study(folder)
        print(f"\nstudy {folder.name}:")
        print(overview(study))
        if command.report:
            _write_report(study, loggers.values(), figures=True)
    _print_notes(command.loggers.values())
    return all_finished


def _report_job(experiment: "Experiment") -> None:
    """Write the report of the study of a single job, and send it to the loggers.

    Drawing figures can take as long as training. They are drawn with `report=true`, or to update
    those of an earlier report.
    """
    from gradsurg.report.export import figures_in
    from gradsurg.report.study import read_study

    study = Path(experiment.settings.out) / experiment.settings.study
    figures = experiment.settings.report is True or bool(figures_in(study / "report"))
    _write_report(read_study(study), experiment.loggers, figures)


def _write_report(study: "Study", loggers: "Iterable[GuardedLogger]", figures: bool) -> None:
    """Write the report of a study, print its path, and send the study to the loggers.

    They get it also if no run is new: the command may have been killed before.
    """
    from gradsurg.report.export import study_info, write_report

    out = study.folder / "report"
    try:
        page = write_report(study, out, figures=figures)
    except OSError as error:
        tell(f"the report cannot be written: {error}")
        return
    print(f"report: {printable(os.path.relpath(page))}")
    info = study_info(study, out)
    for logger in loggers if info.rows else ():  # plain runs alone have no table
        logger.study(info)


def _print_notes(loggers: "Iterable[Logger]") -> None:
    """Print the closing notes of the loggers, each line once."""
    for note in dict.fromkeys(note for logger in loggers for note in logger.notes()):
        print(note)


if __name__ == "__main__":
    ignore_closed_pipes()
    main()
