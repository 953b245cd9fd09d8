"""The command: python -m gradsurg.run transform=clip."""

import os
import sys
import traceback
import warnings
from pathlib import Path

import hydra
from hydra._internal.utils import _is_env_set, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from gradsurg import compose
from gradsurg.build import Experiment, build
from gradsurg.faults import ConfigError
from gradsurg.ledger import SurgeryWarning
from gradsurg.report.terminal import Runs, report
from gradsurg.study import Record, Run, execute

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
ERROR_LOG = "error.log"
ERRORS = Exception  # whatever a run raises: it is told in a line, the traceback goes to a file


class RunFailed(CompactHydraException):
    """A job of a sweep that has failed; Hydra goes on with the others and prints this, no more."""


def main() -> None:
    """Check the whole command line first; then let Hydra run its jobs."""
    try:
        _check()
        job()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(INTERRUPTED)


@hydra.main(config_path=str(compose.CONFIG_DIR), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """One job: all seeds of one config, treated and control, and what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # said while the config was checked
        experiment = build(compose.plain(config))
    if experiment.settings.plan:
        print(experiment.surgery.plan(experiment.make_model(), experiment.example_input))
        return
    runs = []
    reused = 0
    for pair in experiment.pairs:
        control, treated = _run(experiment, pair.control), _run(experiment, pair.treated)
        runs.append(Runs(treated and treated.directory, control and control.directory))
        reused += sum(record.reused for record in (treated, control) if record is not None)
    print(report(runs))
    if reused:
        print(f"{reused} of them had been finished before; force=true repeats them")
    for sink in experiment.sinks:
        for note in sink.notes():
            print(note)


def _check() -> None:
    """Say all that is wrong with the command line, and what the surgery warns of, at once."""
    sys.argv[1:] = _options_first(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    compose.register()
    asks_only = arguments.help or arguments.hydra_help or arguments.info
    if asks_only or arguments.shell_completion:
        return
    name = arguments.config_name or "config"
    dirs = [arguments.config_dir] if arguments.config_dir else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SurgeryWarning)
        try:
            compose.check(
                arguments.overrides, arguments.multirun, dirs, name, builds=not arguments.cfg
            )
        except ConfigError as error:
            for fault in error.faults:
                print(fault, file=sys.stderr)
            sys.exit(WRONG_INPUT)
    for text in dict.fromkeys(str(item.message) for item in caught):
        print(f"warning: {text}", file=sys.stderr)


def _options_first(words: list[str]) -> list[str]:
    """The parser takes overrides in one piece only: put them behind the options."""
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return [word for word in words if word not in overrides] + overrides


def _run(experiment: Experiment, run: Run | None) -> Record | None:
    if run is None:
        return None
    settings = experiment.settings
    log = run.directory(Path(settings.out)) / ERROR_LOG
    try:
        record = execute(
            run, Path(settings.out), experiment.sinks, settings.force, settings.threads
        )
    except ERRORS as error:
        if _is_env_set("HYDRA_FULL_ERROR"):
            raise
        line = f"{run.label}, seed {run.seed}: {_sentence(error)} ({_kept(log)})"
        print(line, file=sys.stderr)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise RunFailed("the runs above failed, the other jobs have been run") from error
        sys.exit(FAILED)
    log.unlink(missing_ok=True)
    return record


def _sentence(error: Exception) -> str:
    """An error and its notes on one line."""
    text = "; ".join([str(error) or "no message", *getattr(error, "__notes__", [])])
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _kept(log: Path) -> str:
    """Where the traceback of the present error is from now on."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
    except OSError as error:
        return f"the traceback could not be written: {error}"
    return f"the traceback is in {os.path.relpath(log)}"


if __name__ == "__main__":
    main()
