"""The command: python -m gradsurg.run transform=clip."""

import sys
import warnings
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from gradsurg import compose
from gradsurg.build import ConfigError, Experiment, build
from gradsurg.ledger import SurgeryWarning
from gradsurg.report.terminal import Runs, report
from gradsurg.study import Record, Run, execute

WRONG_INPUT = 2


def main() -> None:
    """Check the whole command line first; then let Hydra run its jobs."""
    sys.argv[1:] = _options_first(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    asks_only = arguments.help or arguments.hydra_help or arguments.info
    compose.register()
    if not asks_only and not arguments.cfg and not arguments.shell_completion:
        try:
            dirs = [arguments.config_dir] if arguments.config_dir else []
            compose.check(arguments.overrides, arguments.multirun, dirs)
        except ConfigError as error:
            for fault in error.faults:
                print(fault, file=sys.stderr)
            sys.exit(WRONG_INPUT)
    job()


@hydra.main(config_path=str(compose.CONFIG_DIR), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """One job: all seeds of one config, treated and control, and what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # said while the config was checked
        experiment = build(compose.plain(config))
    if experiment.settings.plan:
        print(experiment.surgery.plan(experiment.make_model()))
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


def _options_first(words: list[str]) -> list[str]:
    """The parser takes overrides in one piece only: put them behind the options."""
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return [word for word in words if word not in overrides] + overrides


def _run(experiment: Experiment, run: Run | None) -> Record | None:
    if run is None:
        return None
    settings = experiment.settings
    return execute(run, Path(settings.out), experiment.sinks, settings.force, settings.threads)


if __name__ == "__main__":
    main()
