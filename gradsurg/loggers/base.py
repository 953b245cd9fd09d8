"""What a logger promises, and the guard that keeps a broken one from killing training."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradsurg.plugins.fields import told

State = Literal["finished", "diverged", "failed", "interrupted"]

_log = logging.getLogger("gradsurg")


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told about a run when it starts."""

    study: str
    arm: str
    label: str
    seed: int
    directory: Path
    config: dict[str, object]
    tags: tuple[str, ...]
    total_steps: int
    resumed: bool = False  # what was logged before the interruption is told again


Cell = str | float | int | bool | None


@dataclass(frozen=True)
class StudyInfo:
    """What a study came to: a table, a row an arm or a run, and figures as (title, PNG file).

    `directory` is where a logger may write, beside the study's runs.
    """

    study: str
    directory: Path
    rows: Sequence[Mapping[str, Cell]]
    figures: Sequence[tuple[str, Path]] = ()


class Logger(ABC):
    """A place for logged numbers; one object serves all runs of a study, one after the other."""

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Begin a run; the one before has been finished or abandoned."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one interval's numbers, as `train/loss` or `effect/<transform>/<site>/cosine`."""

    @abstractmethod
    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        """End the run with its outcome."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of a run in which this logger raised, so that the next `start` finds it clean."""

    @abstractmethod
    def notes(self) -> list[str]:
        """Lines to print at the end of everything, as where the runs lie."""


class StudyLogger(Logger):
    """A logger that also takes what a study came to."""

    @abstractmethod
    def study(self, study: StudyInfo) -> None:
        """Take a study's table and figures, instead of those that it was given before."""


class Guarded(Logger):
    """A logger that cannot kill training: what it raises is told, and ends its use for that run.

    A reason is logged as a warning the first time it is met; `notes` says in how many runs the
    logger stopped, and why. The next run tries the logger again. `failure` is the latest reason.
    Jobs of a sweep whose loggers are `made_of` the same have the same logger.
    """

    def __init__(self, logger: Logger, made_of: str = "") -> None:
        self.logger = logger
        self.made_of = made_of
        self.failure: str | None = None
        self._name = type(logger).__name__.lower()
        self._alive = False
        self._runs = 0
        self._failures: dict[str, int] = {}

    def start(self, run: RunInfo) -> None:
        self._runs += 1
        self._alive = True
        self._try("start", lambda: self.logger.start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try("log", lambda: self.logger.log(step, values))

    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        self._try("finish", lambda: self.logger.finish(state, summary))
        self._alive = False

    def study(self, study: StudyInfo) -> None:
        """Pass a study on to a logger that takes one."""
        if isinstance(self.logger, StudyLogger):
            self._runs += 1
            self._alive = True
            taken = self.logger
            self._try("study", lambda: taken.study(study))
            self._alive = False

    def abandon(self) -> None:
        if self._alive:
            self._let_go()

    def notes(self) -> list[str]:
        lost = [
            f"{self._name}: stopped in {count} of {self._runs} runs. {reason}"
            for reason, count in self._failures.items()
        ]
        try:
            return [*self.logger.notes(), *lost]
        except Exception as error:  # a broken logger may raise anything
            return [*lost, f"{self._name}: In notes: {told(error)}"]

    def _try(self, name: str, call: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            call()
        except Exception as error:  # a broken logger may raise anything
            self._record(f"In {name}: {told(error)}")
            self._let_go()

    def _let_go(self) -> None:
        self._alive = False
        try:
            self.logger.abandon()
        except Exception as error:  # a broken logger may raise anything
            self._record(f"In abandon: {told(error)}")

    def _record(self, reason: str) -> None:
        if reason not in self._failures:
            _log.warning("%s stopped logging; training goes on. %s", self._name, reason)
        self._failures[reason] = self._failures.get(reason, 0) + 1
        self.failure = reason
