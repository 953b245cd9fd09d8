"""The console logger: a bar on a terminal, else one line per run."""

from dataclasses import replace
from io import StringIO

import pytest
import rich.console

from gradsurg.loggers.console import Console
from tests.loggers.offline import go, info


def console_on(monkeypatch, terminal):
    file = StringIO()
    screen = rich.console.Console(file=file, force_terminal=terminal, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda **_: screen)
    return file


def test_console_prints_one_line_per_run_without_a_terminal(monkeypatch):
    file = console_on(monkeypatch, terminal=False)
    logger = Console()
    logger.start(info("."))
    logger.log(10, {"train/loss": 1.0})
    assert file.getvalue() == ""
    logger.finish("diverged", {"train/loss": 7.0, "test/loss": 0.25, "test/accuracy": 0.91239})
    line = "clip clip [bold] seed 0: diverged at step 10, test/loss 0.25, test/accuracy 0.9124\n"
    assert file.getvalue() == line
    go(logger)
    assert file.getvalue().count("\n") == 2
    assert logger.notes() == []


def test_console_shows_a_bar_on_a_terminal_and_removes_it(monkeypatch):
    file = console_on(monkeypatch, terminal=True)
    logger = Console()
    logger.start(info("."))
    logger.log(10, {"train/loss": 1.25})
    logger.log(40, {"test/loss": 1.25})
    progress = logger._screen.progress
    assert progress is not None
    assert progress.tasks[0].completed == 40
    assert progress.tasks[0].total == 100
    progress.refresh()
    for words in ("clip [bold] seed 0", "loss 1.25", "40/100", "steps/s"):
        assert words in file.getvalue()
    logger.finish("finished", {"test/accuracy": 0.9})
    assert not progress.live.is_started
    assert file.getvalue().endswith("\x1b[1A\x1b[2K")
    assert "finished" not in file.getvalue()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_console_shows_compiling_until_the_first_log(monkeypatch, backend):
    file = console_on(monkeypatch, terminal=True)
    logger = Console()
    logger.start(replace(info("."), config={"compile": backend}))
    progress = logger._screen.progress
    assert progress is not None
    progress.refresh()
    assert ("compiling" in file.getvalue()) == bool(backend)
    logger.log(1, {"train/loss": 0.5})
    began = len(file.getvalue())
    progress.refresh()
    assert "compiling" not in file.getvalue()[began:]
    logger.abandon()


def test_console_removes_the_bar_of_an_abandoned_run(monkeypatch):
    console_on(monkeypatch, terminal=True)
    logger = Console()
    logger.start(info("."))
    progress = logger._screen.progress
    assert progress is not None
    logger.abandon()
    logger.abandon()
    assert not progress.live.is_started
