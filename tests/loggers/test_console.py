"""The console logger: a bar on a terminal, otherwise one line per run."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from threading import Thread

import pytest
import rich.console

from gradsurg.loggers.console import Console, _NotebookLine
from tests.loggers.offline import alone, go, info


def console_on(monkeypatch, terminal, width=120, **options):
    file = StringIO()
    screen = rich.console.Console(file=file, force_terminal=terminal, width=width, **options)
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
    for words in ("clip [bold] seed 0", "loss 1.25", "100 steps", "steps/s"):
        assert words in file.getvalue()
    logger.finish("finished", {"test/accuracy": 0.9})
    assert not progress.live.is_started
    assert file.getvalue().endswith(
        "\x1b[2Kclip clip [bold] seed 0: finished at step 40, test/accuracy 0.9\n"
    )


def test_without_lines_nothing_of_the_progress_remains(monkeypatch):
    file = console_on(monkeypatch, terminal=True)
    logger = Console(lines=False)
    logger.start(info("."))
    progress = logger._screen.progress
    assert progress is not None
    progress.refresh()
    assert "clip [bold] seed 0" in file.getvalue()
    logger.finish("finished", {"test/accuracy": 0.9})
    assert "finished" not in file.getvalue()
    assert not progress.live.is_started


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_command_without_loggers_shows_its_progress_on_a_terminal_alone(tmp_path, terminal):
    ours, theirs = pty.openpty()
    read: list[bytes] = []
    reading = Thread(target=lambda: read.extend(until_closed(ours)))
    reading.start()
    words = ["transform=clip", "steps=20", "seeds=1", "logger=none", "report=false"]
    done = subprocess.run(
        [sys.executable, "-m", "gradsurg.run", *words],
        cwd=tmp_path,
        env={**alone(tmp_path), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs if terminal else subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(theirs)
    reading.join()
    os.close(ours)
    shown = (b"".join(read) if terminal else done.stderr).decode()
    assert done.returncode == 0
    assert ("run 1 of 2" in shown) == terminal
    assert "finished" not in shown


def until_closed(file: int) -> Iterator[bytes]:
    """Yield what is written to a terminal until no process has it open."""
    with suppress(OSError):
        while content := os.read(file, 65536):
            yield content


def test_a_line_of_a_launchers_process_names_its_job(monkeypatch):
    file = console_on(monkeypatch, terminal=False)
    logger = Console()
    logger.expect(None, job=2)
    go(logger)
    assert file.getvalue().startswith("job 2: clip clip [bold] seed 0: finished")


def visible(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("width", [80, 200])
def test_a_sweep_counts_its_runs_and_fits_the_terminal(monkeypatch, width):
    file = console_on(monkeypatch, terminal=True, width=width)
    logger = Console()
    logger.expect(16)
    for seed in range(3):
        logger.start(info(".", label=f"scale_by_sign+norm_rescale+clip_global_norm-seed{seed}"))
        logger.log(50, {"train/loss": 1.25})
        progress = logger._screen.progress
        assert progress is not None
        progress.refresh()
        logger.finish("finished", {f"test/loss_of_task_{task}": 0.9 for task in range(4)})
    lines = visible(file.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    for words in ("run 3 of 16", " left", "loss 1.25", " 2/16 clip scale_by_sign"):
        assert any(words in line for line in lines), words


@pytest.mark.parametrize("terminal", ["dumb", "no colour", "pipe", "kernel"])
def test_dumb_terminals_pipes_and_no_color_get_no_control_characters(monkeypatch, terminal):
    if terminal == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if terminal == "kernel":
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    options = {"no_color": True} if terminal == "no colour" else {}
    file = console_on(monkeypatch, terminal != "pipe", **options)
    logger = Console()
    logger.expect(2)
    go(logger)
    if terminal == "no colour":
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", file.getvalue())  # no colour, but a bar
    else:
        assert (
            file.getvalue()
            == "1/2 clip clip [bold] seed 0: finished at step 20, test/accuracy 0.9\n"
        )


def test_a_notebook_has_one_output_that_is_updated(monkeypatch):
    outputs, updates = [], []

    class Handle:
        def update(self, content, raw):
            updates.append(content["text/plain"])

    class Display:
        @staticmethod
        def display(content, raw, display_id):
            outputs.append(content["text/plain"])
            return Handle()

    console_on(monkeypatch, terminal=False)
    logger = Console()
    logger._screen.notebook = _NotebookLine(Display)
    logger.expect(2)
    logger.start(info("."))
    for step in range(1, 100):
        logger.log(step, {"train/loss": 1.25})
    logger.finish("finished", {"test/accuracy": 0.9})
    assert outputs == ["run 1 of 2, clip clip [bold] seed 0: step 0 of 100"]
    assert updates[-1] == "1/2 clip clip [bold] seed 0: finished at step 99, test/accuracy 0.9"
    assert len(updates) <= 3


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
