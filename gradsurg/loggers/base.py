"""The interface of loggers, and the guard that keeps a failing logger from ending a training."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gradsurg.plugins.messages import full_message

RunEnd = Literal["finished", "diverged", "failed", "interrupted"]
Cell = str | float | int | bool | None

_log = logging.getLogger("gradsurg")


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that a logger gets when it starts.

    `total_steps` is 0 if it is not known. If `resumed`, the rows logged before the interruption are
    logged again. `better` is "higher" or "lower" for each metric for which it is known, by the last
    part of its name.
    """

    study: str
    arm: str
    label: str
    seed: int
    directory: Path
    config: dict[str, object]
    tags: tuple[str, ...]
    total_steps: int
    resumed: bool = False
    better: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyInfo:
    """The results of a study: a table with a row per arm or run, and figures as (title, PNG file).

    A logger may write to `directory`, which lies beside the study's runs. `verdict` is a sentence.
    `config` says in words what was trained, with the command and the versions. `files` are its page
    and its data, `surgery` has the config of each treated arm, `environment` versions and hardware.
    """

    study: str
    directory: Path
    rows: Sequence[Mapping[str, Cell]]
    figures: Sequence[tuple[str, Path]] = ()
    verdict: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    files: Sequence[Path] = ()
    surgery: Mapping[str, object] = field(default_factory=dict)
    environment: Sequence[Mapping[str, object]] = ()


class Logger(ABC):
    """A destination for logged numbers; one object serves all runs of a study in turn."""

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Start a run; the previous one was finished or abandoned."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one interval's numbers, such as `train/loss` or
        `effect/<transform>/<site>/cosine`."""

    @abstractmethod
    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        """End the run with its outcome."""

    @abstractmethod
    def abandon(self) -> None:
        """Discard a run in which this logger raised, so that the next `start` works."""

    @abstractmethod
    def notes(self) -> list[str]:
        """Return lines to print at the end of the command, such as the location of the runs."""


class ProgressLogger(Logger):
    """A logger that also shows how many of a command's runs have ended."""

    @abstractmethod
    def expect(self, runs: int | None, job: int = 0) -> None:
        """Take the number of runs that the command is about to train; None if it is not known.

        `job` is the number of the job in a process of a launcher, where other processes print too.
        """


class StudyLogger(Logger):
    """A logger that also logs the results of a study."""

    @abstractmethod
    def study(self, study: StudyInfo) -> None:
        """Log a study's table and figures; they replace those logged before."""


class GuardedLogger(Logger):
    """A logger whose exceptions do not end the training.

    An exception ends the use of the logger for the current run; the next run tries it again. Each
    reason is logged once as a warning; `notes` counts the runs in which the logger stopped.
    `failure` is the latest reason. Jobs of a sweep whose loggers have the same `key` share one.
    """

    def __init__(self, logger: Logger, key: str = "") -> None:
        self.logger = logger
        self.key = key
        self.failure: str | None = None
        self._name = type(logger).__name__.lower()
        self._active = False
        self._runs = 0
        self._failures: dict[str, int] = {}

    def start(self, run: RunInfo) -> None:
        self._runs += 1
        self._active = True
        self._try("start", lambda: self.logger.start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try("log", lambda: self.logger.log(step, values))

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        self._try("finish", lambda: self.logger.finish(state, summary))
        self._active = False

    def study(self, study: StudyInfo) -> None:
        """Pass a study on if the logger is a `StudyLogger`."""
        if isinstance(self.logger, StudyLogger):
            self._runs += 1
            self._active = True
            logger = self.logger
            self._try("study", lambda: logger.study(study))
            self._active = False

    def expect(self, runs: int | None, job: int = 0) -> None:
        """Pass the number of runs on if the logger is a `ProgressLogger`."""
        if isinstance(self.logger, ProgressLogger):
            self._active = True
            logger = self.logger
            self._try("expect", lambda: logger.expect(runs, job))
            self._active = False

    def abandon(self) -> None:
        if self._active:
            self._abandon()

    def notes(self) -> list[str]:
        stops = [
            f"{self._name}: stopped in {count} of {self._runs} runs. {reason}"
            for reason, count in self._failures.items()
        ]
        try:
            return [*self.logger.notes(), *stops]
        except Exception as error:  # a failing logger may raise anything
            return [*stops, f"{self._name}: In notes: {full_message(error)}"]

    def _try(self, name: str, call: Callable[[], None]) -> None:
        if not self._active:
            return
        try:
            call()
        except Exception as error:  # a failing logger may raise anything
            self._record(f"In {name}: {full_message(error)}")
            self._abandon()

    def _abandon(self) -> None:
        self._active = False
        try:
            self.logger.abandon()
        except Exception as error:  # a failing logger may raise anything
            self._record(f"In abandon: {full_message(error)}")

    def _record(self, reason: str) -> None:
        if reason not in self._failures:
            _log.warning("%s stopped logging; training goes on. %s", self._name, reason)
        self._failures[reason] = self._failures.get(reason, 0) + 1
        self.failure = reason
