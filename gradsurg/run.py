"""The command: python -m gradsurg.run transform=clip."""

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra._internal.utils import _is_env_set
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gradsurg.config import compose
from gradsurg.config.build import Experiment, build
from gradsurg.config.command import Asked, asked
from gradsurg.config.jobs import ending
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.loggers.base import Guarded, Logger
from gradsurg.plugins.fields import told
from gradsurg.plugins.pipes import outlive_readers
from gradsurg.report.text import Runs, report
from gradsurg.training.run import Run
from gradsurg.training.run_directory import ERROR
from gradsurg.training.study import Record, execute

if TYPE_CHECKING:
    from gradsurg.report.study import StudyReport

FAILED = 1
INTERRUPTED = 130
ERRORS = Exception  # whatever a run raises: it is told in a line, the traceback goes to a file


def main() -> None:
    """Check the whole command line first; then let Hydra run its jobs, and look what they did.

    The exit code is 0 if all went well, 1 if a run failed or, in a sweep, diverged, 2 if the
    command line is wrong.
    """
    try:
        found = asked()
        sweeping = found.sweeping and bool(found.jobs)
        broken = False
        try:
            job()
        except SystemExit:
            if not sweeping:
                raise
            broken = True  # what has ended is told, and what has not
        if sweeping and (not _conclude(found) or broken):
            sys.exit(FAILED)
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
    if not experiment.settings.steps:
        return  # told while the config was checked
    sweeping = HydraConfig.get().mode is RunMode.MULTIRUN
    runs, skipped, wanted, failed = [], 0, 0, 0
    if sweeping and not experiment.finished:
        print(f"job {1 + HydraConfig.get().job.num}: {_words()}", file=sys.stderr, flush=True)
    for pair in experiment.pairs:
        records = [_run(experiment, run, sweeping) for run in pair.runs]
        done = [record for record in records if record and record.summary]
        places = {record.run.name: record.directory for record in done}
        treated, control = (run and places.get(run.name) for run in (pair.treated, pair.control))
        shorter = {link: places.get(run.name) for link, run in pair.without.items()}
        runs.append(Runs(treated, control, shorter))
        skipped += sum(record.action == "skipped" for record in done)
        wanted += len(pair.runs)
        failed += len(pair.runs) - len(done)
    if failed:
        print(f"{failed} of {wanted} runs failed", file=sys.stderr)
    if sweeping:
        return  # told at the end, with those of the other jobs
    if any(run.treated or run.control for run in runs):
        print(report(runs))
    if experiment.settings.report is not False:
        _report_job(experiment, news=skipped + failed < wanted)
    if skipped:
        print(f"{skipped} of them had been finished before; force=true repeats them")
    _print_notes(experiment.loggers)
    if failed:
        sys.exit(FAILED)


def _conclude(found: Asked) -> bool:
    """What a sweep came to: its jobs, and the report of each study; whether all has finished."""
    # What reads a study is imported when there is something to read.
    from gradsurg.report.study import study_report
    from gradsurg.report.text import print_overview

    table, whole = ending(found.jobs)
    if found.news:
        print(table)
    for study, loggers in found.studies.items():
        read = study_report(study)
        print(f"\nstudy {study.name}:")
        print_overview(read)
        if found.report:
            _write(read, loggers.values(), figures=True)
    _print_notes(found.loggers.values())
    return whole


def _report_job(experiment: Experiment, news: bool) -> None:
    """Treat a single job as a study of its own: the page, and the loggers if there is news for them.

    Figures take as long as some trainings, so they are drawn if they were asked for, and where an
    earlier report has some: those would be out of date.
    """
    from gradsurg.report.export import figures_in
    from gradsurg.report.study import study_report

    study = Path(experiment.settings.out) / experiment.settings.study
    figures = experiment.settings.report is True or bool(figures_in(study / "report"))
    _write(study_report(study), experiment.loggers if news else (), figures)


def _write(study: "StudyReport", loggers: Iterable[Guarded], figures: bool) -> None:
    """Write a study's report, say where, and tell the loggers."""
    from gradsurg.report.export import study_info, write_report

    out = study.folder / "report"
    try:
        page = write_report(study, out, figures=figures)
    except OSError as error:
        print(f"the report cannot be written: {error}", file=sys.stderr)
        return
    print(f"report: {page}")
    info = study_info(study, out)
    for logger in loggers if info.rows else ():  # of plain runs alone there is no table
        logger.study(info)


def _print_notes(loggers: Iterable[Logger]) -> None:
    """What loggers have to say at the end, each line once."""
    for note in dict.fromkeys(note for logger in loggers for note in logger.notes()):
        print(note)


def _run(experiment: Experiment, run: Run, sweeping: bool) -> Record | None:
    """Do one run and say what was done about it; None if it has failed."""
    settings = experiment.settings
    out = Path(settings.out)
    who = f"{run.label}, seed {run.seed}"
    try:
        record = execute(run, out, experiment.loggers, settings.threads, settings.retry_failed)
    except ERRORS as error:
        if _is_env_set("HYDRA_FULL_ERROR"):
            raise
        log = os.path.relpath(run.directory(out) / ERROR)
        print(f"{who}: {told(error)} (the traceback is in {log})", file=sys.stderr)
        return None
    if record.action == "not retried":
        print(f"{who}: had failed and is kept so; {record.reason}", file=sys.stderr)
    elif record.action in TOLD:
        print(f"{who}: {TOLD[record.action]}", file=sys.stderr)
    if record.note:
        print(f"{who}: {record.note}", file=sys.stderr)
    return record


TOLD = {
    "resumed": "was interrupted, went on from its checkpoint",
    "retried": "had failed, was tried again",
}


def _words() -> str:
    """The words of the job at hand."""
    return " ".join(HydraConfig.get().overrides.task)


if __name__ == "__main__":
    outlive_readers()
    main()
