"""Console: a progress bar on a terminal; elsewhere one line per finished run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from gradsurg.loggers.base import Logger, RunEnd, RunInfo
from gradsurg.plugins.fields import validated
from gradsurg.plugins.messages import printable

NUM_METRICS = 4  # in the line of a finished run


@dataclass
class _Screen:
    """The state of a `Console`, whose fields are its configuration only."""

    console: rich.console.Console
    run: RunInfo | None = None
    step: int = 0
    progress: Progress | None = None


@validated
class Console(Logger):
    """Shows the progress of a run on stderr, as a bar that is removed when the run ends.

    If stderr is not a terminal (a pipe, CI), prints one line when a run ends.
    """

    @cached_property
    def _screen(self) -> _Screen:
        return _Screen(rich.console.Console(stderr=True))

    def start(self, run: RunInfo) -> None:
        screen = self._screen
        screen.run, screen.step = run, 0
        if screen.console.is_terminal:
            screen.progress = _bar(screen.console)
            # Compiling takes a while, and until the first log there is no loss to show.
            text = "compiling" if run.config.get("compile") else ""
            description = printable(f"{run.arm} {run.label}")
            screen.progress.add_task(description, total=run.total_steps, loss=text)
            screen.progress.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        screen = self._screen
        screen.step = step
        if screen.progress is not None:
            bar = screen.progress.task_ids[0]
            screen.progress.update(bar, completed=step)
            if "train/loss" in values:
                screen.progress.update(bar, loss=f"loss {values['train/loss']:.4g}")

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        screen = self._screen
        no_bar = screen.progress is None
        self.abandon()
        if no_bar and screen.run is not None:
            line = _line(screen.run, screen.step, state, summary)
            screen.console.print(line, markup=False, highlight=False, soft_wrap=True)

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
        return Text(f"{task.speed:.4g} steps/s" if task.speed else "")


def _bar(console: rich.console.Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _line(run: RunInfo, step: int, state: RunEnd, summary: Mapping[str, float]) -> str:
    tests = {key: value for key, value in summary.items() if key.startswith("test/")}
    shown = list((tests or summary).items())[:NUM_METRICS]
    numbers = [f"{key} {value:.4g}" for key, value in shown]
    return printable(", ".join([f"{run.arm} {run.label}: {state} at step {step}", *numbers]))
