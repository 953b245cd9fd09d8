"""Train an experiment from the command line: python -m gradsurg.run transform=clip.

`experiment/overrides.py` checks the arguments, then Hydra composes the config of each job.
`experiment/hydra_errors.py` explains Hydra's errors; `experiment/sweep.py` starts and ends a sweep.
Modules that import torch are imported in functions, so that `--help` and the error for a wrong name
are fast.
"""

import os
import sys
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import gradsurg
from gradsurg.experiment.compose import (
    VERSION_BASE,
    plain,
    register,
    search_path,
    searches,
    split_config_dirs,
    words_of,
)
from gradsurg.experiment.errors import FAILED, WRONG_INPUT, ConfigError
from gradsurg.experiment.hydra_errors import COMPOSE_ERRORS, explained
from gradsurg.experiment.launchers import interrupt_at_time_limit
from gradsurg.experiment.overrides import prepared
from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import printable, tell
from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.plugins.registry import CONFIG_DIR

if TYPE_CHECKING:
    from gradsurg.experiment.runs import Experiment

INTERRUPTED = 130
INTERRUPTION = "interrupted; the same command resumes from the last checkpoint"
COMPLETION = "-sc: is not offered: Hydra's script completes `python FILE`, not `python -m`"
PRINTED = ("job", "hydra", "all")  # the values of --cfg
FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Run the command line; under torchrun the other ranks train each run with rank 0.

    The exit code is 0 if all runs finished, 1 if a run failed, made NaN or, in a sweep, diverged.
    It is 2 for a wrong command line or without the extra `run`, and 130 after an interruption.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _command(sys.argv[1:])
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported
    from gradsurg.experiment.execution import follow
    from gradsurg.experiment.processes import run_in_all

    run_in_all(lambda: _command(sys.argv[1:]), follow)


def _command(words: list[str]) -> None:
    try:
        if any(word.partition("=")[0] == "--list" for word in words):
            _list(words)
            return
        need("run")
        if {"-sc", "--shell-completion", "--shell_completion"} & {*words}:
            raise ConfigError([COMPLETION])
        register()
        sys.argv[1:] = prepared(words)
        options = {word.partition("=")[0] for word in words}
        if {"--cfg", "-c"} & options and not {"-m", "--multirun"} & options:
            _check(sys.argv[1:])
        with _errors_in_one_line(), _allowed():
            job()
    except SystemExit as end:  # code 0 or None: a sweep that has nothing to train
        if end.code:
            raise
    except (ConfigError, MissingExtra) as error:
        tell(str(error))
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        tell(INTERRUPTION)
        sys.exit(INTERRUPTED)


def _check(words: list[str]) -> None:
    """Raise ConfigError for a wrong value of a config that is only printed."""
    from gradsurg.experiment.sweep import jobs_of_study

    folders, others = split_config_dirs(words)
    overrides = [word for word in others if not word.startswith("-") and word not in PRINTED]
    jobs_of_study([*overrides, *([search_path(*folders)] if folders else [])])


@hydra.main(config_path=str(CONFIG_DIR), config_name="config", **VERSION_BASE)
def job(config: DictConfig) -> float | None:
    """Run one job: the treated and the control runs of one config, with all seeds.

    A job of a sweep only writes the files of its runs; the callback `Sweep` reports on all jobs.
    That of a search returns its metric.
    """
    sweeping = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        if sweeping and searches(HydraConfig.get()):
            return _trial(config)
        experiment = _of_sweep(config) if sweeping else _alone(config)
        if experiment.settings.steps and not experiment.settings.dry_run:
            _train(experiment, sweeping)
    except ConfigError as error:  # in a sweep: only if a launcher's process differs from this one
        tell(str(error))
        code = WRONG_INPUT
    except Exception:  # a bug in gradsurg; errors of runs and configs end in one line
        traceback.print_exc()
        code = FAILED
    else:
        return None
    if not sweeping:
        sys.exit(code)
    return None


def _train(experiment: "Experiment", sweeping: bool) -> None:
    """Train the runs of a job. Without a sweep, exit with code 1 if `train` returns False."""
    from gradsurg.experiment.job import train

    words = words_of(HydraConfig.get())
    if not sweeping:
        if not train(experiment, words, in_sweep=False):
            sys.exit(FAILED)
    elif not _is_launched():
        train(experiment, words, in_sweep=True, wait=False)  # `Sweep` does the waiting
    else:
        interrupt_at_time_limit()
        try:
            train(experiment, words, in_sweep=True)
        except KeyboardInterrupt:  # the end of the sweep, in another process, reports on the runs
            tell(INTERRUPTION)


def _trial(config: DictConfig) -> float | None:
    """Run a job of a search."""
    from gradsurg.experiment.search import trial
    from gradsurg.experiment.sweep import check_config

    words, resolved = words_of(HydraConfig.get()), plain(config)
    tell(f"trial {1 + HydraConfig.get().job.num}: {printable(' '.join(words))}")
    check_config(words, resolved)
    if not _is_launched():
        return trial(words, resolved)
    interrupt_at_time_limit()
    try:
        return trial(words, resolved)
    except KeyboardInterrupt:  # as in `_train`
        tell(INTERRUPTION)
        return None


def _is_launched() -> bool:
    """Whether a launcher other than Hydra's basic one has started this job of a sweep."""
    return not str(HydraConfig.get().launcher["_target_"]).endswith(".BasicLauncher")


def _allowed() -> AbstractContextManager[object]:
    """Allow the targets of gradsurg and Hydra: Hydra 1.4 warns about all others."""
    allow = getattr(hydra.utils, "execution_whitelist", None)
    return nullcontext() if allow is None else allow(["gradsurg.*", "hydra.*", "hydra_plugins.*"])


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
    """Check the job of a command without a sweep and record its runs as planned.

    Raises ConfigError.
    """
    from gradsurg.experiment.sweep import check_config

    words, resolved = words_of(HydraConfig.get()), plain(config)
    check_config(words, resolved)
    from gradsurg.experiment.command import Command  # which imports torch

    command = Command()
    experiment = command.add(words, resolved)
    command.plan()
    return experiment


def _of_sweep(config: DictConfig) -> "Experiment":
    """Build a job of a sweep; `Sweep` has checked it before the first job."""
    from gradsurg.effects.ledger import SurgeryWarning
    from gradsurg.experiment.build import build
    from gradsurg.experiment.command import with_shared_loggers

    with warnings.catch_warnings(), chdir(Path.cwd()):  # undoes an os.chdir of a user's code
        warnings.simplefilter("ignore", SurgeryWarning)  # the check has printed it
        experiment = with_shared_loggers(build(plain(config), trial=False))
    settings = experiment.settings
    if settings.steps and not settings.dry_run and not experiment.is_finished:
        number = 1 + HydraConfig.get().job.num
        tell(f"job {number}: {printable(' '.join(words_of(HydraConfig.get())))}")
        if _is_launched():
            for logger in experiment.loggers:
                logger.expect(None, number)
    return experiment


def _list(words: list[str]) -> None:
    """Print the options of a group, or all that fit the words; without either, the groups.

    `--list [GROUP] [WORDS] [--config-dir DIR] [--json]`; the options in DIR are listed too.
    """
    parser = ArgumentParser(prog="python -m gradsurg.run", allow_abbrev=False)
    parser.add_argument("--list", metavar="GROUP or WORD", nargs="*", action="extend")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    folders = [arguments.config_dir] if arguments.config_dir else []
    try:
        entries = gradsurg.list(*arguments.list, config_dirs=folders)
    except LookupError as error:
        raise ConfigError([f"--list: {error.args[0]}"]) from error
    if arguments.json:
        print(entries.json(), end="")
    else:
        print(entries.table() if any(arguments.list) else entries.overview())


if __name__ == "__main__":
    ignore_closed_pipes()
    main()
