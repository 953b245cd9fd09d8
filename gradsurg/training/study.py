"""Run the arms of a study, each once per seed, and record how each run ended."""

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.loggers.base import GuardedLogger, Logger, RunEnd, RunInfo
from gradsurg.surgery.live import Live
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.torch_internals import random_state
from gradsurg.training.checkpoint import Checkpoint, CheckpointTimer, TrainingState
from gradsurg.training.counterfactual import Counterfactual
from gradsurg.training.logged_numbers import RunLog
from gradsurg.training.loop import Batches, Step, StepOptions, TaskLosses, train
from gradsurg.training.run import Run
from gradsurg.training.run_directory import METRICS, RunDirectory
from gradsurg.training.run_identity import RESUMED, environment_changes
from gradsurg.transforms.identity import Identity

Action = Literal["trained", "resumed", "retried", "skipped", "not retried"]

Result = TypeVar("Result")

EXAMINATION_SEED = 1_000_000_007  # added to the run's seed: the weights use that one

QUANTILES = (0.5, 0.9, 0.99, 1.0)  # of |g|, in the note on a transform that changed nothing
MAX_BOUND = 0.9  # of the largest entry or norm: still below it when rounded to two digits


@dataclass(frozen=True)
class Record:
    """A run, its directory, the action of `execute`, and its summary (empty if it has failed)."""

    run: Run
    directory: Path
    summary: dict[str, object]
    action: Action
    reason: str = ""  # of a failure, also of an earlier one that left a broken summary
    note: str = ""  # other measurement intervals than asked for, or resumed in another environment


def execute(
    run: Run,
    out: Path,
    loggers: Sequence[Logger],
    threads: int | None = None,
    retry_failed: bool = True,
) -> Record:
    """Train a run, resume it, or skip it if it is finished; the process is left as it was.

    A resumed run ends bit-identical to an uninterrupted one. A failed run is trained again, unless
    `retry_failed` is False. An exception of the training is written to `error.log` and raised. A
    logger that raises is not used for the rest of the run.
    """
    directory = RunDirectory(run.directory(out).absolute())  # a user's code may call os.chdir
    if directory.finished:
        directory.add_controls(run.facts)
        return _skipped(run, directory)
    with directory.lock():
        state = directory.recorded_state
        if state in ("finished", "diverged"):  # by another process, which had the lock
            directory.add_controls(run.facts, locked=True)
            return _skipped(run, directory)
        if state == "failed" and not retry_failed:
            return Record(run, directory.path, {}, "not retried", directory.reason)
        fault = directory.broken_summary
        directory.clear_error()  # first: a full disk must not leave that of an earlier attempt
        directory.plan(run.facts, run.identity)
        try:
            checkpoint = cast("Checkpoint | None", directory.load_checkpoint())
            summary = _execute(run, directory, loggers, threads, checkpoint)
        except Exception:  # the task, model and transforms are a user's: they may raise anything
            directory.write_error(traceback.format_exc())
            raise
        notes = cast("list[str]", summary["notes"])
        resumed = [note for note in notes if note.startswith(RESUMED)]
        action: Action = "trained" if checkpoint is None else "resumed"
        action = "retried" if state == "failed" else action
        return Record(run, directory.path, summary, action, fault, "; ".join(resumed))


def _skipped(run: Run, directory: RunDirectory) -> Record:
    note = run.measurement_note(directory.known_facts())
    return Record(run, directory.path, directory.read_summary(), "skipped", note=note)


def _execute(
    run: Run,
    directory: RunDirectory,
    loggers: Sequence[Logger],
    threads: int | None,
    checkpoint: Checkpoint | None,
) -> dict[str, object]:
    info = RunInfo(
        run.study,
        run.arm,
        f"{run.label}-seed{run.seed}",
        run.seed,
        directory.path,
        run.identity,
        run.tags,
        run.schedule.steps,
        resumed=checkpoint is not None,
    )
    loggers = [
        logger if isinstance(logger, GuardedLogger) else GuardedLogger(logger) for logger in loggers
    ]
    for logger in loggers:
        logger.start(info)
    state: RunEnd = "failed"
    summary: dict[str, object] = {}
    try:
        with _restored_process(threads, run.device):
            summary = _train(run, directory, loggers, checkpoint)
        directory.write_summary(summary)
        state = "diverged" if summary["state"] == "diverged" else "finished"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        for logger in loggers:
            logger.finish(state, numbers)
    return summary


@contextmanager
def _restored_process(threads: int | None, device: torch.device) -> Iterator[None]:
    """Restore the random generators and the number of threads after the block."""
    before = torch.get_num_threads()
    with random_state.preserved(device):
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _train(
    run: Run, directory: RunDirectory, loggers: Sequence[Logger], checkpoint: Checkpoint | None
) -> dict[str, object]:
    random_state.seed(run.seed)
    data = run.load_data()
    landscape = run.task.landscape()
    if landscape is not None:
        directory.write_landscape(landscape)
    model = run.make_model(data).to(run.device)
    batches = _batches(run, data)
    training = _training_state(run, model)
    warned: list[str] = []
    if checkpoint is not None:
        training.restore(checkpoint)
        changes = environment_changes(checkpoint["made_with"])
        warned = [*checkpoint["warnings"], *([changes] if changes else [])]
    log = _run_log(run, directory, loggers, training, checkpoint)
    timer = CheckpointTimer(run.schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = training.surgery.attach(
            model,
            training.optimizer,
            effects_every=run.schedule.effects_every,
            conflict_every=run.schedule.conflict_every,
            shadow=run.shadow,
            scaler=training.scaler,
            steps_per_epoch=batches.steps_per_epoch,
        )
        with attached as live, run.compute.compiled(model) as compiled:
            if checkpoint is not None:
                live.ledger.resume(checkpoint["ledger"])
                live.effects.resume(checkpoint["effects"], live.ledger)
            for step in _steps(run, training, compiled, batches, log, live):
                if step.done % run.schedule.log_every and step.done != run.schedule.steps:
                    continue
                loss = log.fetch_loss(step)
                tested = log.test(step.done, loss, data, model)
                if not log.interval(step.done, loss, live, tested):
                    break
                # Right after a log no measurement is pending, so checkpoints are saved here only.
                if timer.due(step.done):
                    messages = _surgery_warnings(warned, caught)
                    directory.save_checkpoint(
                        training.checkpoint(step.done, live, messages, log.skipped, log.trained_s)
                    )
            examined = {} if log.diverged else _examined(run, directory, data, model, live)
            examined |= _trajectory_metrics(run, directory, batches)
            every = run.schedule.effects_every
            notes = [] if run.shadow else _idle_notes(training.surgery, live, every)
    _warn_again(caught)
    return log.summary(data, model, examined, notes + _surgery_warnings(warned, caught))


def _batches(run: Run, data: Data) -> Batches:
    return Batches(
        data.train_inputs.to(run.device),
        data.train_targets.to(run.device),
        run.schedule.batch_size,
        run.seed,
        run.compute.accumulate,
        order=data.order.batches if data.order is not None else None,
        epoch_size=data.epoch_size,
    )


def _training_state(run: Run, model: nn.Module) -> TrainingState:
    # A new surgery: that of the run has the state of an earlier execution.
    surgery = Surgery(*run.surgery.interventions, seed=run.surgery.seed)
    optimizer = run.make_optimizer(model)
    schedule, scaler = run.make_lr_schedule(optimizer), run.compute.scaler(run.device)
    return TrainingState(model, optimizer, surgery, run.device, schedule, scaler)


def _run_log(
    run: Run,
    directory: RunDirectory,
    loggers: Sequence[Logger],
    training: TrainingState,
    checkpoint: Checkpoint | None,
) -> RunLog:
    """Return the log of a run that starts, or that resumes from a checkpoint."""
    every = 0 if run.shadow else run.schedule.update_effect_every
    counterfactual = None
    if every:
        counterfactual = Counterfactual(
            training.model, training.optimizer, run.task.loss, every, run.compute.autocast
        )
    log = RunLog(run, directory, loggers, seconds=[], counterfactual=counterfactual)
    if checkpoint is not None:
        log.done, log.skipped = checkpoint["step"], checkpoint["skipped"]
        log.earlier_seconds = checkpoint["seconds"]
    log.replay()
    return log


def _steps(
    run: Run,
    training: TrainingState,
    compiled: nn.Module,
    batches: Batches,
    log: RunLog,
    live: Live,
) -> Iterator[Step]:
    """Yield the remaining steps; record each and compare it with the one without the surgery."""
    options = StepOptions(run.compute.autocast, training.scaler, training.lr_schedule)
    if run.backward_per_task and isinstance(run.task, MultiTask):
        task_losses = TaskLosses(
            _labelled(run.task.losses, run.task, live),
            lambda losses, last: live.backward(losses, aggregate=last),
        )
        options = replace(options, task_losses=task_losses)
    counterfactual = log.counterfactual
    before = counterfactual.before if counterfactual else None
    start, end = log.done, run.schedule.steps
    optimizer, loss_fn = training.optimizer, _labelled(run.task.loss, run.task, live)
    for step in train(compiled, optimizer, loss_fn, batches, end, start, options, before):
        if counterfactual:
            counterfactual.after()
        log.add_step(step)
        yield step


def _labelled(
    function: Callable[[Tensor, Tensor], Result], task: Task, live: Live
) -> Callable[[Tensor, Tensor], Result]:
    """Make a loss give the labels of its batch to the transforms, if one reads them."""
    if not live.reads_labels:
        return function

    def labelled(outputs: Tensor, targets: Tensor) -> Result:
        live.label(task.labels(targets))
        return function(outputs, targets)

    return labelled


def _examined(
    run: Run, directory: RunDirectory, data: Data, model: nn.Module, live: Live
) -> dict[str, float]:
    """Run the task's examination of the trained model, with the surgery attached."""
    if not isinstance(run.task, Examined):
        return {}
    while live.step < run.schedule.steps:  # the scaler skipped steps, or `until` ended the run
        live.tick()
    live.effects.fetch(counted=True)  # effects of the training that are not logged yet
    model.eval()
    with random_state.preserved(run.device):
        random_state.seed((EXAMINATION_SEED + run.seed) % 2**63)  # a seed may fill 64 bits
        examination = run.task.examine(model, data)
    if rows := live.effects.fetch(counted=True):
        directory.write_examined_effects([{"step": live.step, **row} for row in rows])
    live.tick()  # the examination counts as a step
    model.train()
    if examination.saved:
        directory.write_examined(examination.saved)
    return {f"examined/{name}": value for name, value in examination.numbers.items()}


def _trajectory_metrics(run: Run, directory: RunDirectory, batches: Batches) -> dict[str, float]:
    """Return the numbers that the task derives from all tests of the run, also before a resume."""
    if not run.task.trajectory_metric_names:
        return {}
    numbers = run.task.trajectory_metrics(directory.read_rows(METRICS), batches.steps_per_epoch)
    return {f"test/{name}": value for name, value in numbers.items()}


def _surgery_warnings(
    before: Iterable[str], caught: Iterable[warnings.WarningMessage]
) -> list[str]:
    """Return the messages of all surgery warnings, each once."""
    new = [str(item.message) for item in caught if item.category is SurgeryWarning]
    return list(dict.fromkeys([*before, *new]))


def _warn_again(caught: Iterable[warnings.WarningMessage]) -> None:
    """Emit the caught warnings that are not the surgery's, once each."""
    registry: dict[str | tuple[str, type[Warning], int], int] = {}
    for item in caught:
        if item.category is not SurgeryWarning:
            warnings.warn_explicit(
                item.message, item.category, item.filename, item.lineno, registry=registry
            )


def _idle_notes(surgery: Surgery, live: Live, effects_every: int) -> list[str]:
    """Return a note for each transform that changed no entry at the steps that were measured, and
    for each that may skip steps.

    A note has quantiles of |g| and bounds that would have changed some gradients.
    """
    identities = _identity_labels(surgery)
    rows = live.effects.rows()
    where = f" at the steps measured, one in {effects_every}" if effects_every > 1 else ""
    skipped = live.skipped_steps
    notes = [
        f"{label} skipped steps of the optimizer. {number} of {live.step} in the first of these"
        if number
        else f"{label} skipped no step of the optimizer"
        for label, number in skipped.items()
    ]
    for transform in dict.fromkeys(str(row["transform"]) for row in rows):
        effects = [row for row in rows if row["transform"] == transform]
        if transform in (*identities, *skipped) or any(row["changed"] for row in effects):
            continue
        quantiles = live.effects.quantiles(transform, QUANTILES)
        norms = [row["norm_before"] for row in effects]
        norms = [norm for norm in norms if isinstance(norm, float) and isfinite(norm)]
        if not quantiles or not norms:
            continue
        shown = ", ".join(f"{q:.0%} {v:.2g}" for q, v in zip(QUANTILES, quantiles, strict=True))
        reach = f"norms from {min(norms):.2g} to {max(norms):.2g}"
        notes.append(
            f"{transform} changed nothing{where}. Quantiles of |g|: {shown}; {reach}. "
            + suggested_bounds(quantiles, norms)
        )
    return notes


def _identity_labels(surgery: Surgery) -> set[str]:
    """Return the labels of the identity transforms, which should change nothing."""
    return {
        label
        for item, labels in zip(surgery.interventions, surgery.labels, strict=True)
        for label, link in zip(labels, item.links, strict=item.aggregator is None)
        if isinstance(link, Identity)
    }


def suggested_bounds(quantiles: Sequence[float], norms: Sequence[float]) -> str:
    """Return a sentence with bounds below some entry and some norm, also after rounding.

    `quantiles` of |g| are those at `QUANTILES`.
    """
    largest, norm = quantiles[-1], max(norms)
    if not largest or not norm:
        return "The gradients were zero."
    usual = next(value for value in quantiles[1:] if value)
    entry_bound = min(usual, MAX_BOUND * largest)
    norm_bound = min(median(norms) or norm, MAX_BOUND * norm)
    bounds = f"{entry_bound:.2g} on entries, or of {norm_bound:.2g} on norms"
    return f"A bound of {bounds}, would change some."
