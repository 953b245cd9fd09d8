"""The command: python -m gradsurg.run transform=clip."""

import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import hydra
from hydra._internal.utils import _is_env_set, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gradsurg import compose
from gradsurg.arms import Run
from gradsurg.build import Experiment, build
from gradsurg.faults import ConfigError
from gradsurg.jobs import Job, beginning, ending, job_of, prepare
from gradsurg.ledger import SurgeryWarning
from gradsurg.report.terminal import Runs, report
from gradsurg.store import ERROR
from gradsurg.study import Record, execute

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
ERRORS = Exception  # whatever a run raises: it is told in a line, the traceback goes to a file


def main() -> None:
    """Check the whole command line first; then let Hydra run its jobs, and look what they did."""
    whole = True
    try:
        arguments = _arguments()
        jobs = _check(arguments) if arguments else []
        try:
            job()
        finally:
            if jobs and arguments and arguments.multirun:
                table, whole = ending(jobs)
                print(table)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if not whole:
        sys.exit(FAILED)


@hydra.main(config_path=str(compose.CONFIG_DIR), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """One job: all seeds of one config, treated and control, and what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # said while the config was checked
        experiment = build(compose.plain(config))
    if experiment.settings.plan:
        print(experiment.surgery.plan(experiment.make_model(), experiment.example_input))
        return
    sweeping = HydraConfig.get().mode is RunMode.MULTIRUN
    runs, skipped, wanted, failed = [], 0, 0, 0
    for pair in experiment.pairs:
        records = [_run(experiment, run, sweeping) for run in pair.runs]
        done = [record for record in records if record and record.summary]
        places = {record.run.name: record.directory for record in done}
        treated, control = (run and places.get(run.name) for run in (pair.treated, pair.control))
        shorter = {link: places.get(run.name) for link, run in pair.without.items()}
        runs.append(Runs(treated, control, shorter))
        skipped += sum(record.happened == "skipped" for record in done)
        wanted += len(pair.runs)
        failed += len(pair.runs) - len(done)
    if any(run.treated for run in runs) or not experiment.surgery.interventions:
        print(report(runs))
    if failed:
        print(f"{failed} of {wanted} runs failed", file=sys.stderr)
    if skipped and not sweeping:
        print(f"{skipped} of them had been finished before; force=true repeats them")
    for sink in experiment.sinks:
        for note in sink.notes():
            print(note)
    if failed and not sweeping:
        sys.exit(FAILED)


def _arguments() -> Namespace | None:
    """What was typed; None if it asks a question of Hydra's and trains nothing."""
    sys.argv[1:] = _options_first(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    compose.register()
    asks_only = arguments.help or arguments.hydra_help or arguments.info
    return None if asks_only or arguments.shell_completion else arguments


def _check(arguments: Namespace) -> list[Job]:
    """Say all that is wrong with the command line, and what the surgery warns of, at once.

    What is right is written down: each run that is to be, before the first is trained.
    """
    name = arguments.config_name or "config"
    dirs = [arguments.config_dir] if arguments.config_dir else []
    jobs: list[Job] = []
    asked: set[tuple[bool, bool, bool]] = set()

    def keep(words: list[str], experiment: Experiment) -> None:
        settings = experiment.settings
        asked.add((settings.force, settings.retry_failed, settings.plan))
        runs = [run for pair in experiment.pairs for run in pair.runs]
        jobs.append(job_of(words, runs, Path(settings.out)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SurgeryWarning)
        try:
            words, sweeping = compose.sweep(arguments.overrides, arguments.multirun, dirs, name)
            arguments.multirun = sweeping
            compose.check(words, sweeping, dirs, name, keep, builds=not arguments.cfg)
        except ConfigError as error:
            for fault in error.faults:
                print(fault, file=sys.stderr)
            sys.exit(WRONG_INPUT)
    for text in dict.fromkeys(str(item.message) for item in caught):
        print(f"warning: {text}", file=sys.stderr)
    if arguments.cfg or any(plan for _, _, plan in asked):
        return []
    try:
        states = prepare(jobs, any(force for force, _, _ in asked))
    except OSError as error:
        print(f"out: cannot be written to: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    if arguments.multirun:
        print(beginning(len(jobs), states, all(retry for _, retry, _ in asked)), file=sys.stderr)
    return jobs


def _options_first(words: list[str]) -> list[str]:
    """The parser takes overrides in one piece only: put them behind the options."""
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return [word for word in words if word not in overrides] + overrides


def _run(experiment: Experiment, run: Run, sweeping: bool) -> Record | None:
    """Do one run and say what was done about it; None if it has failed."""
    settings = experiment.settings
    out = Path(settings.out)
    who = f"{run.label}, seed {run.seed}"
    try:
        record = execute(run, out, experiment.sinks, settings.threads, settings.retry_failed)
    except ERRORS as error:
        if _is_env_set("HYDRA_FULL_ERROR"):
            raise
        log = os.path.relpath(run.directory(out) / ERROR)
        print(f"{who}: {_sentence(error)} (the traceback is in {log})", file=sys.stderr)
        return None
    if record.happened == "kept failed":
        print(f"{who}: had failed and is kept so; {record.reason}", file=sys.stderr)
    elif record.happened in TOLD and (sweeping or record.happened != "skipped"):
        print(f"{who}: {TOLD[record.happened]}", file=sys.stderr)
    return record


TOLD = {
    "resumed": "was interrupted, went on from its checkpoint",
    "retried": "had failed, was tried again",
    "skipped": "finished before, skipped",
}


def _sentence(error: Exception) -> str:
    """An error and its notes on one line."""
    text = "; ".join([str(error) or "no message", *getattr(error, "__notes__", [])])
    return f"{type(error).__name__}: {' '.join(text.split())}"


if __name__ == "__main__":
    main()
