"""Console: the progress of a command on a terminal or in a notebook, and a line per ended run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing import current_process
from time import monotonic
from typing import Any

import rich.console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from gradsurg.loggers.base import ProgressLogger, RunEnd, RunInfo
from gradsurg.plugins.fields import validated
from gradsurg.plugins.messages import printable

KERNEL = "JPY_PARENT_PID"  # is set in the processes of a notebook's kernel
NUM_METRICS = 4  # in the line of an ended run
NOTEBOOK_SECONDS = 0.5  # between two updates of a notebook's line


@dataclass
class _Screen:
    """The state of a `Console`, whose fields are its configuration only."""

    console: rich.console.Console
    run: RunInfo | None = None
    step: int = 0
    progress: Progress | None = None
    expected: int | None = None  # the runs of the command; None if it is not known
    job: int = 0  # of a sweep, in a process of a launcher
    ended: int = 0
    began: float = 0.0
    last: str = ""  # the last loss
    notebook: "_NotebookLine | None" = None


@validated
class Console(ProgressLogger):
    """Prints a line to stderr when a run ends, and shows the progress of the current run above it.

    A terminal shows two bars, which are removed at the end: the current run with its loss and
    speed, and the command's runs with the time left. A notebook shows one line that is updated.
    Elsewhere (a pipe, a file, CI, `TERM=dumb`, `!command` in a notebook) and in the processes of a
    launcher only the lines of ended runs are printed, in a launcher's with the number of the job.
    `NO_COLOR` leaves out colours. With `lines=False` no line is printed for an ended run: nothing
    of the progress remains.
    """

    lines: bool = True

    @cached_property
    def _screen(self) -> _Screen:
        console = rich.console.Console(stderr=True)
        notebook = _NotebookLine(import_module("IPython.display")) if console.is_jupyter else None
        return _Screen(console, notebook=notebook)

    @property
    def is_updated(self) -> bool:
        """Whether the current run is shown: on a terminal and in a notebook, not in a pipe."""
        return _is_live(self._screen) or self._screen.notebook is not None

    def expect(self, runs: int | None, job: int = 0) -> None:
        screen = self._screen
        screen.expected, screen.ended, screen.began, screen.job = runs, 0, monotonic(), job

    def start(self, run: RunInfo) -> None:
        screen = self._screen
        screen.run, screen.step = run, 0
        # Compiling takes a while, and until the first log there is no loss to show.
        screen.last = "compiling" if run.config.get("compile") else ""
        if screen.expected is not None and screen.ended >= screen.expected:
            screen.expected = screen.ended + 1  # after a tuning its chosen values are trained
        if _is_live(screen):
            screen.progress = _bars(screen)
            screen.progress.start()
        elif screen.notebook is not None:
            screen.notebook.show(_notebook_text(screen), force=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        screen = self._screen
        screen.step = step
        if "train/loss" in values:
            screen.last = f"loss {values['train/loss']:.4g}"
        if screen.progress is not None:
            screen.progress.update(TaskID(0), completed=step, last=screen.last)
            if len(screen.progress.task_ids) > 1 and screen.run is not None:
                done = screen.ended + step / max(1, screen.run.total_steps)
                screen.progress.update(TaskID(1), completed=done, last=_time_left(screen, done))
        elif screen.notebook is not None:
            screen.notebook.show(_notebook_text(screen))

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        screen = self._screen
        self.abandon()
        screen.ended += 1
        if screen.run is None:
            return
        if not self.lines:
            if screen.notebook is not None:
                screen.notebook.show("", force=True)
            return
        line = _line(screen, state, summary)
        if screen.notebook is not None:
            screen.notebook.end(line)
        else:
            style = "red" if state in ("diverged", "failed") else None
            screen.console.print(
                line, style=style, markup=False, highlight=False, soft_wrap=not _is_live(screen)
            )

    def abandon(self) -> None:
        screen = self._screen
        if screen.progress is not None:
            screen.progress.stop()
            screen.progress = None

    def notes(self) -> list[str]:
        return []


class _Rate(ProgressColumn):
    """Steps per second, not counting the steps before a resume."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.4g} steps/s" if task.speed and not task.id else "")


class _Remaining(TimeRemainingColumn):
    """The time left of the current run; the command's bar has its own as text."""

    def render(self, task: Task) -> Text:
        return Text() if task.id else super().render(task)


def _is_live(screen: _Screen) -> bool:
    console = screen.console
    is_main = current_process().name == "MainProcess"  # those of joblib share one terminal
    # A notebook's `!command` has a terminal without a cursor that moves up.
    moves_up = not (console.is_dumb_terminal or KERNEL in os.environ)
    return console.is_terminal and moves_up and is_main


def _bars(screen: _Screen) -> Progress:
    assert screen.run is not None
    run, total = screen.run, screen.expected or 1
    name = Column(max_width=screen.console.width // 3, no_wrap=True, overflow="ellipsis")
    progress = Progress(
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[last]}", markup=False),
        _Rate(),
        _Remaining(compact=True),
        console=screen.console,
        transient=True,
        expand=True,
    )
    count = f"{run.total_steps} steps" if run.total_steps else ""
    progress.add_task(_name(run), total=run.total_steps or None, last=screen.last, count=count)
    if total > 1:
        text = f"run {screen.ended + 1} of {total}"
        left = _time_left(screen, screen.ended)
        progress.add_task(text, total=total, completed=screen.ended, last=left, count="")
    return progress


def _name(run: RunInfo) -> str:
    """The arm and the label; the plain control has the label `none`."""
    return printable(f"{run.arm} {run.label}".replace("control none-", "control "))


def _time_left(screen: _Screen, done: float) -> str:
    """Return the time that the remaining runs take if they are as long as those before."""
    if not done or screen.expected is None:
        return ""
    seconds = round((monotonic() - screen.began) * (screen.expected - done) / done)
    minutes, seconds = divmod(max(0, seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def _line(screen: _Screen, state: RunEnd, summary: Mapping[str, float]) -> str:
    run = screen.run
    assert run is not None
    number = f"job {screen.job}: " if screen.job else ""
    if screen.expected is not None and screen.expected > 1:
        width = len(str(screen.expected))
        number = f"{screen.ended:{width}}/{screen.expected} "
    tests = {key: value for key, value in summary.items() if key.startswith("test/")}
    shown = list((tests or summary).items())[:NUM_METRICS]
    numbers = [f"{key} {value:.4g}" for key, value in shown]
    whole = state == "finished" and screen.step == run.total_steps
    end = state if whole else f"{state} at step {screen.step}"
    parts = [f"{number}{_name(run)}: {end}", *numbers]
    while _is_live(screen) and len(", ".join(parts)) > screen.console.width and len(parts) > 1:
        parts.pop()
    return printable(", ".join(parts))


def _notebook_text(screen: _Screen) -> str:
    run = screen.run
    assert run is not None
    many = screen.expected is not None and screen.expected > 1
    of = f"run {screen.ended + 1} of {screen.expected}, " if many else ""
    step = f": step {screen.step} of {run.total_steps}" if run.total_steps else ""
    return ", ".join(filter(None, [f"{of}{_name(run)}{step}", screen.last]))


class _NotebookLine:
    """The output of a notebook's cell: lines of ended runs, and one that is updated."""

    def __init__(self, display: Any) -> None:  # Any: IPython may not be installed
        self._lines: list[str] = []
        self._display = display
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, text: str, force: bool = False) -> None:
        """Update the line, at most every NOTEBOOK_SECONDS unless `force`."""
        if not force and monotonic() - self._shown_at < NOTEBOOK_SECONDS:
            return
        self._shown_at = monotonic()
        content = {"text/plain": "\n".join([*self._lines, text] if text else self._lines)}
        if self._handle is None:
            self._handle = self._display.display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def end(self, line: str) -> None:
        """Replace the updated line by that of an ended run."""
        self._lines.append(line)
        self.show("", force=True)
