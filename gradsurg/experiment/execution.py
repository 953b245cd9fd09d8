"""Execute one run: skip, resume or train it, and record how it ended."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor, nn

from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.experiment import processes
from gradsurg.experiment.build import build
from gradsurg.experiment.checkpoint import Checkpoint, CheckpointTimer, TrainingState
from gradsurg.experiment.compose import AGAIN, again
from gradsurg.experiment.files import replace_file
from gradsurg.experiment.idle import idle_notes
from gradsurg.experiment.logged_numbers import RunLog
from gradsurg.experiment.loop import Losses, Step, StepOptions, train
from gradsurg.experiment.processes import Team
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import (
    ERROR,
    EXAMINED,
    FACTS,
    METRICS,
    RunDirectory,
)
from gradsurg.experiment.run_identity import environment_changes
from gradsurg.experiment.run_reader import known
from gradsurg.experiment.settings import Config
from gradsurg.loggers.base import GuardedLogger, Logger, RunEnd, RunInfo
from gradsurg.tasks.base import Examined, MultiTask
from gradsurg.torch_internals import random_state

Action = Literal["trained", "resumed", "retried", "skipped", "not retried", "busy"]

EXAMINATION_SEED = 1_000_000_007  # added to the run's seed, which itself seeds the weights
RANK_SEED = 1_000_000_009  # times the rank, added to the run's seed
SHARED_BY_RANKS = ("model", "optimizer", "lr_schedule", "scaler", "made_with")
"""The parts of a checkpoint that are the same in all processes."""


@dataclass(frozen=True)
class Record:
    """A run, its directory, what `execute` did, and its summary (empty if busy or not retried)."""

    run: Run
    directory: Path
    summary: dict[str, object]
    action: Action
    reason: str = ""  # of a failure; after a retry, of the broken summary that the earlier try left
    note: str = ""  # it lacks measurements asked for, or was resumed in another environment


def execute(
    run: Run,
    out: Path,
    loggers: Sequence[Logger],
    threads: int | None = None,
    retry_failed: bool = True,
    wait: bool = True,
) -> Record:
    """Train a run, resume it, or skip it if it has ended; restore random states and threads.

    If another process is training it, wait, or without `wait` return a record with "busy". A
    resumed run ends bit-identical to an uninterrupted one. A failed run is trained again, unless
    `retry_failed` is False. An exception of the training is written to `error.log` and raised. A
    logger that raises is not used for the rest of the run.
    """
    directory = RunDirectory(run.directory(out).absolute())  # a user's code may call os.chdir
    if directory.finished:
        directory.add_facts(run.facts)
        return _skipped(run, directory)
    with directory.lock(wait) as obtained:
        if not obtained:
            return Record(run, directory.path, {}, "busy")
        state = directory.recorded_state
        if state in ("finished", "diverged"):  # by another process, which had the lock
            directory.add_facts(run.facts)
            return _skipped(run, directory)
        if state == "failed" and not retry_failed:
            return Record(run, directory.path, {}, "not retried", directory.reason)
        fault = "" if (directory.path / ERROR).is_file() else directory.reason
        # Before training: on a full disk the file of an earlier attempt could not be removed later.
        (directory.path / ERROR).unlink(missing_ok=True)
        directory.plan(run.facts, run.identity)
        if run.config:
            text = again(run.config, run.seed, directory.path)
            replace_file(directory.path / AGAIN, text.encode())
        try:
            checkpoint = directory.load_checkpoint()
            summary = _execute(run, directory, loggers, threads, checkpoint)
        except Exception:  # the task, model and transforms are a user's: they may raise anything
            directory.write_error(traceback.format_exc())
            raise
        action: Action = "trained" if checkpoint is None else "resumed"
        action = "retried" if state == "failed" else action
        note = "" if checkpoint is None else environment_changes(checkpoint["made_with"])
        return Record(run, directory.path, summary, action, fault, note)


def _skipped(run: Run, directory: RunDirectory) -> Record:
    note = run.measurement_note(known(directory.path / FACTS))
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
        run.title,
        run.seed,
        directory.path,
        {**run.identity, "surgery": run.surgery.digest} if run.arm == "treated" else run.identity,
        run.tags,
        run.schedule.steps,
        resumed=checkpoint is not None,
        better={number.name: number.better for number in TASK_METRICS if number.better},
    )
    loggers = [
        logger if isinstance(logger, GuardedLogger) else GuardedLogger(logger) for logger in loggers
    ]
    for logger in loggers:
        logger.start(info)
    state: RunEnd = "interrupted"  # by Ctrl-C, or by SystemExit: a launcher moves its job
    summary: dict[str, object] = {}
    try:
        with _restored_process(threads, run.device):
            processes.tell_others((run.config, run.seed, run.name, checkpoint))
            summary = _train(lambda: run, directory, loggers, checkpoint)
        directory.write_summary(summary)
        state = "diverged" if summary["state"] == "diverged" else "finished"
    except Exception:  # loggers get the state after any error
        state = "failed"
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
    make_run: Callable[[], Run],
    directory: RunDirectory,
    loggers: Sequence[Logger],
    checkpoint: Checkpoint | None,
) -> dict[str, object]:
    """Train a run in all processes of the command; return its summary, {} in ranks other than 0."""
    with ExitStack() as attached:
        with processes.together():
            opened = _OpenRun(make_run(), directory, loggers, checkpoint)
            with ExitStack() as entered:
                opened.caught = entered.enter_context(warnings.catch_warnings(record=True))
                warnings.simplefilter("always")
                entered.enter_context(opened.attach())
                opened.train(entered.enter_context(opened.run.compute.compiled(opened.model)))
                # `examine` needs the hooks after the process group has ended.
                attached.enter_context(entered.pop_all())
        if opened.rank:
            return {}
        opened.examine()  # in rank 0 alone
    return opened.summary()


def follow(team: Team) -> None:
    """Wait for the orders of rank 0 and train each run with it, until the command ends."""
    while order := team.broadcast(None):
        *words, checkpoint = order
        # Rank 0 prints the error.
        with TemporaryDirectory(prefix="gradsurg-") as folder, suppress(Exception):
            _train(partial(_built, *words), RunDirectory(folder), [], checkpoint)


def _built(config: Config, seed: int, name: str) -> Run:
    """Build the run with this name and seed from the config of its job."""
    one = {"seed": seed, "splits": 1, "attribute": False, "tune": None, "logger": {}}
    experiment = build({**config, **one}, trial=False)
    torch.set_num_threads(experiment.settings.threads or torch.get_num_threads())
    for run in experiment.runs:
        if run.name == name:
            return run
    raise RuntimeError(f"there is no run {name} here: the code or data differ from those of rank 0")


class _OpenRun:
    """A run in training: its data, model, surgery and log, from a checkpoint or from step 0."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        loggers: Sequence[Logger],
        checkpoint: Checkpoint | None,
    ) -> None:
        random_state.seed(run.seed)
        self.run, self.directory, self.rank = run, directory, processes.rank()
        self._warned: list[str] = []
        self.caught: list[warnings.WarningMessage] = []  # while it is attached
        self.data = run.load_data()
        self.model = run.make_model(self.data).to(run.device)
        self.batches = run.batches(self.data, run.device, self.rank, processes.count())
        optimizer = run.make_optimizer(self.model)
        # A new surgery: `run.surgery` keeps the state of an earlier execution in this process.
        surgery = Surgery(*run.surgery.interventions, seed=run.surgery.seed)
        schedule, scaler = run.make_lr_schedule(optimizer), run.compute.scaler(run.device)
        self.training = TrainingState(self.model, optimizer, surgery, run.device, schedule, scaler)
        self.log = RunLog(run, directory, loggers)
        self.checkpoint = self._restored(checkpoint) if checkpoint is not None else None
        if checkpoint is None and self.rank:  # so that dropout differs between the parts of a batch
            random_state.seed((RANK_SEED * self.rank + run.seed) % 2**63)
        self.log.replay()
        self.timer = CheckpointTimer(run.schedule)
        self._examined: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._is_idle = False

    def _restored(self, checkpoint: Checkpoint) -> Checkpoint:
        """Load a checkpoint, and return it with this rank's parts in place of rank 0's."""
        if self.rank:
            own = checkpoint.get("ranks", [])[self.rank - 1]
            checkpoint = checkpoint | own
        self.training.restore(checkpoint)
        self.log.done, self.log.skipped = checkpoint["step"], checkpoint["skipped"]
        self.log.trained_s = checkpoint["seconds"]
        changes = environment_changes(checkpoint["made_with"])
        self._warned = [*checkpoint["warnings"], *([changes] if changes else [])]
        return checkpoint

    def attach(self) -> Live:
        """Attach the surgery to the model, with the counts of the checkpoint."""
        run, training = self.run, self.training
        self.live = live = training.surgery.attach(
            self.model,
            training.optimizer,
            effects_every=run.schedule.effects_every,
            conflict_every=run.schedule.conflict_every,
            shadow=run.shadow,
            scaler=training.scaler,
            steps_per_epoch=self.batches.steps_per_epoch,
        )
        if self.checkpoint is not None:
            live.ledger.resume(self.checkpoint["ledger"])
            live.effects.resume(self.checkpoint["effects"], live.ledger)
        return live

    def train(self, compiled: nn.Module) -> None:
        """Make the remaining steps with the compiled model, and log them."""
        every = self.run.schedule.check_ranks
        for step in self._steps(processes.wrapped(compiled)):
            if every and step.done % every == 0:
                processes.check_ranks(self.model)
            is_last = step.done == self.run.schedule.steps
            is_logged = is_last or step.done % self.run.schedule.log_every == 0
            if is_logged and not self._log_interval(step.done, self.log.fetch_loss(step)):
                break

    def _steps(self, model: nn.Module) -> Iterator[Step]:
        """Yield the remaining steps; record each."""
        run, training, log, live = self.run, self.training, self.log, self.live

        def give(inputs: Tensor, targets: Tensor) -> None:
            live.set_batch(inputs=inputs, targets=targets)
            if live.reads_example_labels:
                live.set_example_labels(run.task.labels(targets))

        autocast, scaler = run.compute.autocast, training.scaler
        options = StepOptions(autocast, scaler, training.lr_schedule, on_batch=give)
        loss_fn: Callable[[Tensor, Tensor], Losses] = run.task.loss
        if run.backward_per_task and isinstance(run.task, MultiTask):
            loss_fn = run.task.losses
            options = replace(
                options, backward=lambda losses, last: live.backward(losses, aggregate=last)
            )

        steps = (self.batches, run.schedule.steps, log.done)
        for step in train(model, training.optimizer, loss_fn, *steps, options):
            log.add_step(step)
            yield step

    def _log_interval(self, done: int, loss: float) -> bool:
        """Log the interval that ends with step `done`, and save a due checkpoint; False if it was
        the last one.
        """
        goes_on = self.log.interval(done, loss, self.live, self.data, self.model)
        goes_on, is_due = processes.from_first((goes_on, goes_on and self.timer.due(done)))
        # Right after a log no measurement is pending, so checkpoints are saved here only.
        if is_due:
            self._save_checkpoint(done)
        return goes_on

    def _save_checkpoint(self, done: int) -> None:
        log = self.log
        checkpoint = self.training.checkpoint(
            done, self.live, self._surgery_warnings(), log.skipped, log.trained_s
        )
        if processes.count() > 1:
            own = {key: value for key, value in checkpoint.items() if key not in SHARED_BY_RANKS}
            checkpoint["ranks"] = processes.gathered(own)[1:]
        if not self.rank:
            self.directory.save_checkpoint(checkpoint)

    def examine(self) -> None:
        """Run the task's examination of the trained model; note transforms that changed nothing."""
        run = self.run
        if isinstance(run.task, Examined) and not self.log.diverged:
            self._examined = self._examination(run.task)
        if run.task.trajectory_metric_names:  # rows of the whole run, also from before a resume
            rows, epoch = self.directory.read_rows(METRICS), self.batches.steps_per_epoch
            numbers = run.task.trajectory_metrics(rows, epoch)
            self._examined |= {f"test/{name}": value for name, value in numbers.items()}
        if not run.shadow:
            every = run.schedule.effects_every
            self._notes, self._is_idle = idle_notes(self.training.surgery, self.live, every)

    def _examination(self, task: Examined) -> dict[str, float]:
        """Run the task's examination of the trained model."""
        run, live, model = self.run, self.live, self.model
        while live.step < run.schedule.steps:  # the scaler skipped steps, or `until` ended the run
            live.tick()
        live.effects.fetch(counted=True)  # effects of the training that are not logged yet
        model.eval()
        with random_state.preserved(run.device):
            random_state.seed((EXAMINATION_SEED + run.seed) % 2**63)  # a seed may fill 64 bits
            examination = task.examine(model, self.data)
        if rows := live.effects.fetch(counted=True):
            self.directory.write_examined_effects([{"step": live.step, **row} for row in rows])
        live.tick()  # the examination counts as a step
        model.train()
        if examination.saved:
            self.directory.write_json(EXAMINED, examination.saved, indent=None)
        return {f"examined/{name}": value for name, value in examination.numbers.items()}

    def summary(self) -> dict[str, object]:
        """Emit the recorded warnings that are not the surgery's; return the outcome."""
        registry: dict[str | tuple[str, type[Warning], int], int] = {}  # each is emitted once
        for item in self.caught:
            if item.category is not SurgeryWarning:
                place = item.filename, item.lineno
                warnings.warn_explicit(item.message, item.category, *place, registry=registry)
        notes = self._notes | dict.fromkeys(self._surgery_warnings(), "")
        outcome = self.log.summary(self.data, self.model, self._examined, notes)
        return outcome | ({"idle": True} if self._is_idle else {})

    def _surgery_warnings(self) -> list[str]:
        """Return the messages of all surgery warnings, each once."""
        new = [str(item.message) for item in self.caught if item.category is SurgeryWarning]
        return list(dict.fromkeys([*self._warned, *new]))
