"""Train the runs of a study in stacks, into the same directories as one by one."""

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from gradsurg.core.live import Live
from gradsurg.experiment.checkpoint import Checkpoint, CheckpointTimer, load_checkpoint
from gradsurg.experiment.execution import Action, OpenRun, Record, restored_process, run_info
from gradsurg.experiment.run import Run, Schedule
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_identity import RESUMED
from gradsurg.experiment.run_reader import BrokenFile
from gradsurg.loggers.base import GuardedLogger, Logger, ProgressLogger
from gradsurg.plugins.messages import full_message
from gradsurg.stacked.acting import Slices, groups_of, treatment
from gradsurg.stacked.refusals import model_refusal, run_refusal, stack_key
from gradsurg.stacked.stack import Stack, Unstackable, quiet
from gradsurg.torch_internals import random_state

MAX_REPLICAS = 256
"""The most replicas of one stack: each holds the lock of its directory, an open file."""

FLUSH_S = 2.0
"""Seconds after which the rows of logs are written, at the next log."""

SAVE_SHARE = 20
"""Seconds of training for each second in which checkpoints are saved."""

FIRST_SAVE_S = 0.25
"""Seconds that the first save is taken to need."""


class BufferedDirectory(RunDirectory):
    """The directory of a replica, which appends the rows of several logs at a time.

    They are written before a checkpoint and the summary, before they are read, and by `flush`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._rows: dict[str, list[Mapping[str, object]]] = {}

    def flush(self) -> None:
        """Write the rows."""
        rows, self._rows = self._rows, {}
        for name, own in rows.items():
            super()._append(name, own)

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        self.flush()
        super().save_checkpoint(state)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        self.flush()
        super().write_summary(summary)

    def read_rows(self, name: str) -> list[dict[str, Any]]:  # Any: any JSON value
        self.flush()
        return super().read_rows(name)

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        self._rows.setdefault(name, []).extend(rows)


@dataclass
class _Replica:
    """A run that is taken into a stack, with its locked directory."""

    run: Run
    directory: BufferedDirectory
    action: Action
    fault: str  # of an earlier attempt
    checkpoint: Checkpoint | None


def execute_stacked(
    runs: Iterable[Run],
    out: Path,
    loggers: Sequence[Logger],
    threads: int | None = None,
    retry_failed: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Record]:
    """Train those of the runs that are not finished and can be replicas of a stack; return their
    records by name.

    Runs that cannot, and all runs of a stack that fails, are left to `execute`; `tell` gets a line
    for each reason. Stacks of at least two runs share `stack_key` and the step of their checkpoint.
    A run that another process trains is left to `execute` too, which waits for it.
    """
    records: dict[str, Record] = {}
    groups: dict[str, list[Run]] = {}
    refused: Counter[str] = Counter()
    different = {run.name: run for run in runs}
    for run in different.values():
        if RunDirectory(run.directory(out)).finished:
            continue
        if reason := run_refusal(run):
            refused[reason] += 1
        else:
            groups.setdefault(stack_key(run), []).append(run)
    for group in groups.values():
        for start in range(0, len(group), MAX_REPLICAS):
            with ExitStack() as locks:
                some = group[start : start + MAX_REPLICAS]
                taken = [_taken(run, out, retry_failed, locks) for run in some]
                for step, replicas in _by_step(taken).items():
                    if len(replicas) == 1:
                        refused["there is no other run to stack"] += 1
                        continue
                    program = _Program(replicas, step, loggers, tell)
                    if reason := _train(program, threads):
                        refused[reason] += len(replicas) - len(program.records)
                    records |= program.records
    for reason, count in refused.items():
        tell(f"{reason}: {_runs(count)} trained one by one")
    return records


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def _by_step(taken: Iterable["_Replica | None"]) -> dict[int, list["_Replica"]]:
    """Return the replicas by the step that they start from."""
    by_step: dict[int, list[_Replica]] = {}
    for replica in taken:
        if replica is not None:
            step = replica.checkpoint["step"] if replica.checkpoint is not None else 0
            by_step.setdefault(step, []).append(replica)
    return by_step


def _train(program: "_Program", threads: int | None) -> str:
    """Train a stack; return the reason if its runs are left to `execute`, else ''."""
    try:
        with restored_process(threads, program.device), quiet():
            reason = program.take()
            if not reason:
                program.begin()
                program.train()
            return reason
    except Unstackable as refusal:
        return str(refusal)
    except Exception as error:  # tasks, models and transforms are a user's
        logging.getLogger("gradsurg").debug("%s", traceback.format_exc())
        return f"the stack failed ({full_message(error)})"
    finally:
        program.close()


def _taken(run: Run, out: Path, retry_failed: bool, locks: ExitStack) -> _Replica | None:
    """Lock the directory of an unfinished run and load its checkpoint; None if `execute` has to."""
    directory = BufferedDirectory(run.directory(out).absolute())
    with ExitStack() as lock:
        try:
            obtained = lock.enter_context(directory.lock(wait=False))
        except OSError:  # a folder that cannot be written
            obtained = False
        if not obtained:
            return None
        state = directory.recorded_state
        if state in ("finished", "diverged") or (state == "failed" and not retry_failed):
            return None
        try:
            fault = directory.broken_summary
            directory.clear_error()
            directory.plan(run.facts, run.identity)
            checkpoint = load_checkpoint(directory)
        except (OSError, ValueError, BrokenFile):
            return None
        locks.enter_context(lock.pop_all())
    action: Action = "trained" if checkpoint is None else "resumed"
    action = "retried" if state == "failed" else action
    return _Replica(run, directory, action, fault, checkpoint)


class _StackTimer(CheckpointTimer):
    """Decides for all replicas together; saving them takes at most one second in `SAVE_SHARE`."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._steps, self._asked = schedule.steps, -1
        self._is_due = False
        self._began = monotonic()
        self._earliest = self._began + SAVE_SHARE * FIRST_SAVE_S

    def due(self, done: int) -> bool:
        """Whether to save at the log after step `done`: the same answer for each replica."""
        if done != self._asked:
            self._asked, self._began = done, monotonic()
            wait = done < self._steps and self._began < self._earliest
            self._is_due = not wait and super().due(done)
        return self._is_due

    def end_log(self) -> None:
        """Note the seconds that a save has taken."""
        if self._is_due:
            now = monotonic()
            self._earliest = now + SAVE_SHARE * (now - self._began)
            self._is_due = False


class _Program:
    """One stack from opening its runs to their summaries."""

    def __init__(
        self,
        replicas: Sequence[_Replica],
        start: int,
        loggers: Sequence[Logger],
        tell: Callable[[str], None],
    ) -> None:
        self.records: dict[str, Record] = {}
        self.device = replicas[0].run.device
        self._tell = tell
        self._start = start
        self._replicas = sorted(replicas, key=lambda replica: treatment(replica.run))
        self._loggers = [
            logger if isinstance(logger, GuardedLogger) else GuardedLogger(logger)
            for logger in loggers
        ]
        self._runs: list[OpenRun] = []
        self._lives: list[Live] = []
        self._first_step = ""
        self._compile_s = 0.0
        self._exits = ExitStack()  # of the compiler
        self._flushed_at = monotonic()

    def take(self) -> str:
        """Open all runs; return the reason if their model or optimizer has no stacked form."""
        self._generators: list[random_state.GeneratorStates] = []
        for replica in self._replicas:
            like = self._runs[0] if self._runs else None
            opened = OpenRun(replica.run, replica.directory, [], replica.checkpoint, like=like)
            self._generators.append(random_state.get_states(replica.run.device))
            self._runs.append(opened)
        first = self._runs[0]
        return model_refusal(first.model, first.training.optimizer)

    def begin(self) -> None:
        """Stack the runs, attach the surgeries, compare the first step with a sequential one."""
        self._stack = stack = Stack(self._runs, self._generators)
        count = _runs(len(self._runs))
        compute = self._runs[0].run.compute
        if compute.compile is not None:
            self._compile_s = stack.compile(self._start, compute.compiled, self._exits)
        difference, grads = stack.first_difference(self._start)
        self._timer = _StackTimer(stack.schedule)
        for row, opened in enumerate(self._runs):
            opened.timer = self._timer
            if stack.evaluates:
                opened.log.tested = lambda part, row=row: stack.metrics(part)[row]
            with opened.recorded_warnings():
                self._lives.append(opened.attach())
        self._groups = groups_of(self._runs, stack.params, grads, stack.tasks)
        batches = [group for group in self._groups if not isinstance(group, Slices)]
        difference = max([difference, *(batch.difference for batch in batches)])
        same = not difference and compute.compile is None
        self._first_step = "bit-identical" if same else f"differs by {difference:.1e}"
        compared = f"is {self._first_step} to" if same else f"{self._first_step} from"
        compiled = f", compiled in {self._compile_s:.1f} s" if self._compile_s else ""
        self._tell(
            f"{count} as one stack{compiled}; its first step {compared} that of a sequential run"
        )

    def _show_progress(self, done: int, losses: Tensor) -> None:
        """Show the stack as one run on a terminal."""
        shown = [each for each in self._loggers if isinstance(each.logger, ProgressLogger)]
        run, directory = self._replicas[0].run, self._replicas[0].directory
        for logger in shown:
            if done == self._start:
                info = run_info(run, directory, None)
                count = len(self._runs)
                logger.start(replace(info, arm="stack of", label=_runs(count), runs=count))
            else:
                logger.log(done, {"train/loss": losses.mean().item()})

    def close(self) -> None:
        """Detach the surgeries of runs that have not ended, and end the progress."""
        self._exits.close()
        for live in self._lives:
            live.abort()
        for logger in self._loggers:
            logger.abandon()

    def train(self) -> None:
        """Make all steps; each run ends by itself at its last log."""
        stack, steps = self._stack, self._stack.schedule.steps
        active = list(range(len(self._runs)))
        pending: list[tuple[int, Tensor, float]] = []
        self._show_progress(self._start, torch.empty(0))
        for done in range(self._start + 1, steps + 1):
            inputs, targets = stack.batch(done - 1)
            began = perf_counter()
            losses, grads = stack.gradients(inputs, targets)
            for group in self._groups:
                group.act(done - 1, grads, active)
            stack.step(grads)
            seconds = (perf_counter() - began) / len(self._runs)
            pending.append((done, losses, seconds))
            if self._runs[0].is_logged(done):
                self._show_progress(done, losses)
                active = self._log(active, pending, done == steps)
                pending = []
            if not active:
                break

    def _log(
        self, active: Sequence[int], pending: Sequence[tuple[int, Tensor, float]], last: bool
    ) -> list[int]:
        """Log the interval of each active run; return those that go on."""
        done = pending[-1][0]
        losses = torch.stack([losses for _, losses, _ in pending]).T.tolist()
        seconds = sum(seconds for *_, seconds in pending)
        going = []
        for row in active:
            opened = self._runs[row]
            with opened.recorded_warnings():
                for group in self._groups:
                    group.end_interval(row, done)
                opened.log.add_losses(done, losses[row], seconds)
                goes_on = opened.log_interval(done, losses[row][-1])
            if goes_on and not last:
                going.append(row)
            else:
                self._finish(row)
        if going and len(going) < len(active):
            self._show_progress(self._start, torch.empty(0))
        for group in self._groups:
            group.clear()
        self._timer.end_log()
        if monotonic() - self._flushed_at > FLUSH_S:
            for row in going:
                self._replicas[row].directory.flush()
            self._flushed_at = monotonic()
        return going

    def _finish(self, row: int) -> None:
        """Write the summary of a run, and send the whole run to the loggers."""
        opened, replica = self._runs[row], self._replicas[row]
        with opened.recorded_warnings():
            opened.examine()
            opened.live.close()
        summary = opened.summary()
        summary["runner"] = {
            "name": "stacked",
            "replicas": len(self._runs),
            "first_step": self._first_step,
        } | ({"compile_s": self._compile_s} if self._compile_s else {})
        # A share of the time of the stack, which no other arm can be compared with.
        summary |= {"time/step_ms": None, "time/measured_step_ms": None}
        info = run_info(replica.run, replica.directory, replica.checkpoint)
        for logger in self._loggers:
            logger.abandon()  # the progress of the stack
            logger.start(info)
        if self._loggers:
            opened.log.loggers = self._loggers
            opened.log.replay()
        replica.directory.write_summary(summary)
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        for logger in self._loggers:
            logger.finish("diverged" if summary["state"] == "diverged" else "finished", numbers)
        notes = cast("list[str]", summary["notes"])
        resumed = [note for note in notes if note.startswith(RESUMED)]
        self.records[replica.run.name] = Record(
            replica.run,
            replica.directory.path,
            summary,
            replica.action,
            replica.fault,
            "; ".join(resumed),
        )
