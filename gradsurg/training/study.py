"""Arms that are compared: run each of them once, seed by seed, and keep the record."""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from gradsurg.loggers.base import Guarded, Logger, RunInfo
from gradsurg.loggers.base import State as LoggerState
from gradsurg.surgery.live import Live
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, Examined, MultiTask
from gradsurg.torch_internals import random_state
from gradsurg.training.arms import Run
from gradsurg.training.checkpoint import Checkpoint, Saving, Trainee
from gradsurg.training.counterfactual import Counterfactual
from gradsurg.training.idle import changed_nothing
from gradsurg.training.logging import RunLog
from gradsurg.training.loop import Batches, Several, Step, StepOptions, train
from gradsurg.training.run_directory import METRICS, RunDirectory
from gradsurg.training.run_identity import RESUMED, environment_changes
from gradsurg.training.warned import pass_on, said_once

Happened = Literal["trained", "resumed", "retried", "skipped", "kept failed"]

EXAMINATION = 1_000_000_007  # its seeds are other ones than those of the weights

ERRORS = Exception  # whatever training raises is written down beside the run, and raised again


@dataclass(frozen=True)
class Record:
    """Where a run lies, what was done about it, and how it ended (empty: it has failed)."""

    run: Run
    directory: Path
    summary: dict[str, object]
    happened: Happened
    reason: str = ""  # of a failure
    note: str = ""  # what of the request is not met, or of the promise to resume bit for bit


def execute(
    run: Run,
    out: Path,
    loggers: Sequence[Logger],
    threads: int | None = None,
    retry_failed: bool = True,
) -> Record:
    """Do a run, or take up a finished or an interrupted one; nothing is left behind in the process.

    A finished run is not repeated; an interrupted one goes on from its checkpoint and ends as if it
    had never been interrupted; one that has failed is tried again, or left if not `retry_failed`.
    What it raises is kept in its `error.log` and raised. A logger that raises is left out from then
    on.
    """
    place = RunDirectory(run.directory(out))
    if place.finished:
        place.pair(run.facts)
        return _skipped(run, place)
    with place.held():
        before = place.unheld_state
        if before in ("finished", "diverged"):  # another process was at it
            place.pair(run.facts, alone=True)
            return _skipped(run, place)
        if before == "failed" and not retry_failed:
            return Record(run, place.path, {}, "kept failed", place.reason)
        happened: Happened = "trained"
        if before == "failed":
            happened = "retried"
        elif place.resumable:
            happened = "resumed"
        place.plan(run.facts, run.identity)
        place.forget_error()
        try:
            summary = _execute(run, place, loggers, threads)
        except ERRORS:
            place.write_error(traceback.format_exc())
            raise
        notes = cast("list[str]", summary["notes"])
        otherwise = [note for note in notes if note.startswith(RESUMED)]
        return Record(run, place.path, summary, happened, note="; ".join(otherwise))


def _skipped(run: Run, place: RunDirectory) -> Record:
    note = run.measured_otherwise(place.known_facts())
    return Record(run, place.path, place.read_summary(), "skipped", note=note)


def _execute(
    run: Run, place: RunDirectory, loggers: Sequence[Logger], threads: int | None
) -> dict[str, object]:
    info = RunInfo(
        run.study,
        run.arm,
        f"{run.label}-seed{run.seed}",
        run.seed,
        place.path,
        run.identity,
        run.tags,
        run.schedule.steps,
        resumed=place.resumable,
    )
    loggers = [logger if isinstance(logger, Guarded) else Guarded(logger) for logger in loggers]
    for logger in loggers:
        logger.start(info)
    state: LoggerState = "failed"
    summary: dict[str, object] = {}
    try:
        with _quarantine(threads, run.device):
            summary = _train(run, place, loggers)
        place.write_summary(summary)
        state = "diverged" if summary["state"] == "diverged" else "finished"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        for logger in loggers:
            logger.finish(state, numbers)
    return summary


def _train(run: Run, place: RunDirectory, loggers: Sequence[Logger]) -> dict[str, object]:
    random_state.seed(run.seed)
    data = run.task.load()
    landscape = run.task.landscape()
    if landscape is not None:
        place.write_landscape(landscape)
    model = run.make_model(data).to(run.device)
    batches = _batches(run, data)
    trainee = _trainee(run, model)
    kept = cast("Checkpoint | None", place.load_checkpoint())
    if kept is not None:
        trainee.take_up(kept)
    said = [] if kept is None else [*kept["said"], *_made_otherwise(kept)]
    log = _log(run, place, loggers, trainee, kept)
    saving = Saving(run.schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = trainee.surgery.attach(
            model,
            trainee.optimizer,
            effects_every=run.schedule.effects_every,
            shadow=run.shadow,
            scaler=trainee.scaler,
            steps_per_epoch=batches.steps_per_epoch,
        )
        with attached as live, run.switches.compiled(model) as called:
            if kept is not None:
                live.ledger.resume(kept["ledger"])
                live.effects.resume(kept["effects"], live.ledger)
            for step in _steps(run, trainee, called, batches, log, live):
                if step.done % run.schedule.log_every and step.done != run.schedule.steps:
                    continue
                loss = step.loss.item()  # a wait for the device, at logs only
                tested = log.tested(step.done, loss, data, model)
                if not log.interval(step.done, loss, live, tested):
                    break
                # Only here is nothing half-gathered, so the first log after a due step saves.
                if saving.due(step.done):
                    told = said_once(said, caught)
                    place.save_checkpoint(
                        trainee.checkpoint(step.done, live, told, log.skipped, log.trained_s)
                    )
            examined = {} if log.diverged else _examined(run, place, data, model, live)
            examined |= _followed(run, place, batches)
            every = run.schedule.effects_every
            notes = [] if run.shadow else changed_nothing(trainee.surgery, live, every)
    pass_on(caught)
    return log.summary(data, model, examined, notes + said_once(said, caught))


def _batches(run: Run, data: Data) -> Batches:
    return Batches(
        data.train_inputs.to(run.device),
        data.train_targets.to(run.device),
        run.schedule.batch_size,
        run.seed,
        run.switches.accumulate,
        order=data.order.batches if data.order is not None else None,
        epoch_size=data.epoch_size,
    )


def _trainee(run: Run, model: nn.Module) -> Trainee:
    # A surgery of one's own: that of the run has the state of whatever was executed with it before.
    surgery = Surgery(*run.surgery.interventions, seed=run.surgery.seed)
    optimizer = run.make_optimizer(model)
    schedule, scaler = run.make_lr_schedule(optimizer), run.switches.scaler(run.device)
    return Trainee(model, optimizer, surgery, run.device, schedule, scaler)


def _log(
    run: Run,
    place: RunDirectory,
    loggers: Sequence[Logger],
    trainee: Trainee,
    kept: Checkpoint | None,
) -> RunLog:
    """The log of a run that begins, or that goes on where a checkpoint was kept."""
    every = 0 if run.shadow else run.schedule.update_effect_every
    without = None
    if every:
        autocast = run.switches.autocast
        without = Counterfactual(trainee.model, trainee.optimizer, run.task.loss, every, autocast)
    log = RunLog(run, place, loggers, seconds=[], without=without)
    if kept is not None:
        log.done, log.skipped, log.earlier_seconds = kept["step"], kept["skipped"], kept["seconds"]
    log.again()
    return log


def _steps(
    run: Run, trainee: Trainee, called: nn.Module, batches: Batches, log: RunLog, live: Live
) -> Iterator[Step]:
    """The steps that are left, counted by the log and compared with those without the surgery."""
    manner = StepOptions(run.switches.autocast, trainee.scaler, trainee.lr_schedule)
    if run.several and isinstance(run.task, MultiTask):
        several = Several(
            run.task.losses, lambda losses, last: live.backward(losses, aggregate=last)
        )
        manner = replace(manner, several=several)
    before = log.without.before if log.without else None
    start, end = log.done, run.schedule.steps
    optimizer, loss_fn = trainee.optimizer, run.task.loss
    for step in train(called, optimizer, loss_fn, batches, end, start, manner, before):
        if log.without:
            log.without.after()
        log.took(step)
        yield step


def _examined(
    run: Run, place: RunDirectory, data: Data, model: nn.Module, live: Live
) -> dict[str, float]:
    """What the task's examination finds, with the surgery attached; nothing if it has none."""
    if not isinstance(run.task, Examined):
        return {}
    while live.step < run.schedule.steps:  # steps that were skipped, or were not needed any more
        live.tick()
    live.effects.fetch(counted=True)  # what is left of the training
    model.eval()
    with random_state.kept(run.device):
        random_state.seed((EXAMINATION + run.seed) % 2**63)  # a seed may fill 64 bits
        examination = run.task.examine(model, data)
    if rows := live.effects.fetch(counted=True):
        place.write_examined_effects([{"step": live.step, **row} for row in rows])
    live.tick()  # it was a step of its own
    model.train()
    if examination.saved:
        place.write_examined(examination.saved)
    return {f"examined/{name}": value for name, value in examination.numbers.items()}


def _followed(run: Run, place: RunDirectory, batches: Batches) -> dict[str, float]:
    """What the task makes of all tests of the run, those before an interruption too."""
    if not run.task.trajectory_metric_names:
        return {}
    found = run.task.trajectory_metrics(place.read_rows(METRICS), batches.steps_per_epoch)
    return {f"test/{name}": value for name, value in found.items()}


def _made_otherwise(kept: Checkpoint) -> list[str]:
    said = environment_changes(kept["made_with"])
    return [said] if said else []


@contextmanager
def _quarantine(threads: int | None, device: torch.device) -> Iterator[None]:
    """Give back the random generators and the number of threads as they were."""
    before = torch.get_num_threads()
    with random_state.kept(device):
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
