"""Loggers: a broken one is told and survived; W&B and the console get what was logged."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import rich.console
from omegaconf import OmegaConf

from gradsurg.loggers.base import Guarded, Logger, RunInfo, StudyInfo, StudyLogger
from gradsurg.loggers.console import Console
from gradsurg.loggers.wandb import Wandb, _glob_argument, _location
from gradsurg.plugins import registry
from gradsurg.plugins.fields import FieldError

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def info(directory, seed=0, label="clip [bold] seed 0"):
    return RunInfo(
        study="study",
        arm="clip",
        label=label,
        seed=seed,
        directory=Path(directory),
        config={"lr": 0.1, "model": {"hidden": [64, 64]}},
        tags=("clip", "mlp"),
        total_steps=100,
    )


class Fragile(Logger):
    """Raises in the calls named, until told not to; remembers what it was asked."""

    def __init__(self, *broken):
        self.broken = set(broken)
        self.asked = []

    def _ask(self, name):
        self.asked.append(name)
        if name in self.broken:
            raise ConnectionError(f"{name}\nbroke")

    def start(self, run):
        self._ask("start")

    def log(self, step, values):
        self._ask("log")

    def finish(self, state, summary):
        self._ask("finish")

    def abandon(self):
        self._ask("abandon")

    def notes(self):
        self._ask("notes")
        return ["a note"]


def go(logger, directory="."):
    logger.start(info(directory))
    logger.log(10, {"train/loss": 1.0})
    logger.log(20, {"train/loss": 0.5})
    logger.finish("finished", {"test/accuracy": 0.9})


def content_of(path) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return content


def test_every_logger_has_a_yaml_with_its_defaults_under_its_own_key():
    conf = ROOT / "conf" / "logger"
    assert sorted(path.stem for path in conf.glob("*.yaml")) == sorted(
        [*registry.names("loggers"), "none"]
    )
    assert OmegaConf.load(conf / "none.yaml") == {}
    for name in registry.names("loggers"):
        content = content_of(conf / f"{name}.yaml")
        assert list(content) == [name]
        fields = content[name]
        assert fields.pop("name") == name
        made = registry.find("loggers", name)
        assert made(**fields) == made()


def test_a_guard_passes_everything_on_to_a_logger_that_works():
    logger = Fragile()
    guarded = Guarded(logger)
    go(guarded)
    assert logger.asked == ["start", "log", "log", "finish"]
    assert guarded.failure is None
    assert guarded.notes() == ["a note"]


@pytest.mark.parametrize(
    ("broken", "asked"),
    [
        ("start", ["start", "abandon"]),
        ("log", ["start", "log", "abandon"]),
        ("finish", ["start", "log", "log", "finish", "abandon"]),
    ],
)
def test_what_a_logger_raises_is_told_once_and_ends_its_use_for_that_run(caplog, broken, asked):
    logger = Fragile(broken)
    guarded = Guarded(logger)
    with caplog.at_level(logging.WARNING):
        go(guarded)
    assert logger.asked == asked
    reason = f"In {broken}: ConnectionError: {broken} broke"
    assert guarded.failure == reason
    assert [record.getMessage() for record in caplog.records] == [
        f"fragile stopped logging; training goes on. {reason}"
    ]
    assert guarded.notes() == ["a note", f"fragile: stopped in 1 of 1 runs. {reason}"]


def test_the_next_run_tries_a_failed_logger_again(caplog):
    logger = Fragile("log")
    guarded = Guarded(logger)
    go(guarded)
    go(guarded)
    assert len(caplog.records) == 1
    logger.broken.clear()
    logger.asked.clear()
    go(guarded)
    assert logger.asked == ["start", "log", "log", "finish"]
    assert guarded.notes()[1].startswith("fragile: stopped in 2 of 3 runs. In log: ")


def test_a_logger_that_cannot_even_be_abandoned_or_asked_for_notes_is_survived(caplog):
    guarded = Guarded(Fragile("log", "abandon", "notes"))
    go(guarded)
    assert len(caplog.records) == 2
    notes = guarded.notes()
    assert [note.split(" In ")[1].split(":")[0] for note in notes[:2]] == ["log", "abandon"]
    assert notes[2] == "fragile: In notes: ConnectionError: notes broke"


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Fragile):
        def log(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(Guarded(Interrupted()))


def test_abandoning_reaches_a_live_logger_once():
    logger = Fragile()
    guarded = Guarded(logger)
    guarded.start(info("."))
    guarded.abandon()
    guarded.abandon()
    guarded.log(1, {})
    assert logger.asked == ["start", "abandon"]


class FragileStudy(Fragile, StudyLogger):
    def study(self, study):
        self._ask("study")


def test_a_study_goes_to_a_logger_that_takes_one_and_what_it_raises_is_survived(caplog):
    study = StudyInfo("study", Path("report"), [{"arm": "clip", "n": 3}])
    plain, taker, broken = Fragile(), FragileStudy(), FragileStudy("study")
    guarded = [Guarded(logger) for logger in (plain, taker, broken)]
    for logger in guarded:
        logger.study(study)
    assert (plain.asked, taker.asked) == ([], ["study"])
    assert broken.asked == ["study", "abandon"]
    assert [logger.failure for logger in guarded] == [
        None,
        None,
        "In study: ConnectionError: study broke",
    ]
    assert len(caplog.records) == 1


def console_on(monkeypatch, terminal):
    file = StringIO()
    screen = rich.console.Console(file=file, force_terminal=terminal, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda **_: screen)
    return file


def test_console_prints_one_line_a_run_where_there_is_no_terminal(monkeypatch):
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


def test_console_shows_a_bar_on_a_terminal_and_takes_it_away(monkeypatch):
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
def test_console_says_that_a_model_is_compiled_until_the_first_log(monkeypatch, backend):
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


def test_console_abandons_its_bar(monkeypatch):
    console_on(monkeypatch, terminal=True)
    logger = Console()
    logger.start(info("."))
    progress = logger._screen.progress
    assert progress is not None
    logger.abandon()
    logger.abandon()
    assert not progress.live.is_started


SCRIPT = """
import json, os, signal, subprocess, sys
from pathlib import Path
from gradsurg.loggers.base import Guarded, RunInfo
from gradsurg.loggers.wandb import Wandb

def run(seed):
    return RunInfo("study", "clip", f"clip {seed}", seed, Path("runs") / f"clip-{seed}",
                   {"lr": 0.1, "model": {"hidden": [64, 64]}}, ("clip", "mlp"), 100)

def kill_core():
    out = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid,cmd"],
                         capture_output=True, text=True).stdout
    (pid,) = [line.split()[0] for line in out.splitlines() if "wandb-core" in line]
    os.kill(int(pid), signal.SIGKILL)

"""


def alone(tmp_path):
    """An environment in which wandb finds no account, no settings and no server."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return env | {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "netrc"),
        "PYTHONPATH": str(ROOT),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        # nothing may be reached, whatever goes wrong
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }


def run_wandb(tmp_path, code, mode=None):
    """Runs `code` after SCRIPT in a process of its own, in `tmp_path`."""
    env = alone(tmp_path)
    if mode is not None:
        env["WANDB_MODE"] = mode
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def inspect(tmp_path, path):
    done = subprocess.run(
        [BIN / "wandb", "leet", "inspect", "--json", path],
        env=alone(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_wandb_run_read_back_has_what_was_logged(tmp_path):
    done = run_wandb(
        tmp_path,
        """
logger = Wandb(mode="offline", project="clipping")
for seed, state in ((0, "finished"), (1, "diverged")):
    logger.start(run(seed))
    logger.log(10, {"train/loss": 1.5, "effect/clip/hidden.0.linear.weight/changed": 0.125})
    logger.log(20, {"train/loss": float("nan") if seed else 0.75})
    logger.finish(state, {"test/accuracy": 0.875})
print(json.dumps(logger.notes()))
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    paths = [*sorted((tmp_path / "runs").glob("clip-*/wandb/offline-run-*"))]
    assert len(paths) == 2
    first, second = (inspect(tmp_path, path) for path in paths)

    (begun,) = of_type(first, "run")
    named = ("display_name", "run_group", "job_type", "project", "tags")
    assert [begun[key] for key in named] == ["clip 0", "study", "clip", "clipping", ["clip", "mlp"]]
    config = begun["config"]["update"]
    assert (config["lr"], config["model"]) == (0.1, {"hidden": [64, 64]})
    (axis,) = of_type(first, "metric")
    assert (axis["glob_name"], axis["step_metric"]) == ("*", "global_step")
    assert rows(first) == [
        {"global_step": 10, "train/loss": 1.5, "effect/clip/hidden.0.linear.weight/changed": 0.125},
        {"global_step": 20, "train/loss": 0.75},
    ]
    assert rows(second)[1] == {"global_step": 20, "train/loss": "NaN"}
    outcomes = [
        {key: update["update"][key] for key in ("state", "test/accuracy")}
        for records in (first, second)
        for update in of_type(records, "summary")
        if "state" in update["update"]
    ]
    assert outcomes == [
        {"state": "finished", "test/accuracy": 0.875},
        {"state": "diverged", "test/accuracy": 0.875},
    ]
    assert [of_type(records, "exit")[0]["exit_code"] for records in (first, second)] == [0, 1]
    assert json.loads(done.stdout) == [
        "W&B (offline): 2 runs under runs",
        "  to upload: wandb sync runs/*/wandb/offline-run-*",
    ]


def of_type(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


def rows(records):
    """What was logged, without wandb's own numbers."""
    items = [history["item"] for history in of_type(records, "history")]
    return [{key: item[key] for key in item if not key.startswith("_")} for item in items]


def test_the_study_of_each_wandb_logger_is_kept_and_takes_the_place_of_its_own_alone(tmp_path):
    done = run_wandb(
        tmp_path,
        """
from gradsurg.loggers.base import StudyInfo

for project, number in (("one", 1), ("two", 2), ("one", 3)):
    logger = Wandb(mode="offline", project=project)
    logger.study(StudyInfo("study", Path("runs/report"), [{"arm": "clip", "n": number}]))
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    paths = (tmp_path / "runs" / "report" / "wandb").glob("offline-run-*")
    kept = {}
    for path in paths:
        (begun,) = of_type(inspect(tmp_path, path), "run")
        (table,) = path.rglob("*.table.json")
        kept[begun["project"]] = json.loads(table.read_text())["data"]
    assert kept == {"one": [["clip", 3]], "two": [["clip", 2]]}


def test_a_killed_wandb_core_is_survived_and_the_next_run_is_logged(tmp_path):
    done = run_wandb(
        tmp_path,
        """
logger = Guarded(Wandb(mode="offline"))
logger.start(run(0))
logger.log(10, {"train/loss": 1.5})
kill_core()
for step in range(20, 2000, 10):
    logger.log(step, {"train/loss": 0.5})
    if logger.failure: break
logger.finish("finished", {})
print(logger.failure)
logger.start(run(1))
logger.log(10, {"train/loss": 0.25})
logger.finish("finished", {})
print(logger.notes()[-1])
""",
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "wandb stopped logging; training goes on. In log: " in done.stderr
    failure, note = done.stdout.splitlines()
    assert failure.startswith("In log: ConnectionResetError: ")
    assert note == f"wandb: stopped in 1 of 2 runs. {failure}"
    (second,) = (tmp_path / "runs" / "clip-1" / "wandb").glob("offline-run-*")
    assert rows(inspect(tmp_path, second)) == [{"global_step": 10, "train/loss": 0.25}]


@pytest.mark.parametrize(
    ("mode", "field", "made", "notes"),
    [
        (None, "auto", "offline", 2),
        ("offline", "auto", "offline", 2),
        ("disabled", "auto", None, 0),
        ("online", "auto", "offline", 3),
        (None, "online", "offline", 3),
        (None, "disabled", None, 0),
    ],
)
def test_wandb_without_an_account_never_asks_and_does_what_the_user_said(
    tmp_path, mode, field, made, notes
):
    done = run_wandb(
        tmp_path,
        f"""
logger = Wandb(mode={field!r})
for seed in range(2):
    logger.start(run(seed))
    logger.log(10, {{"train/loss": 1.5}})
    logger.finish("finished", {{}})
print(json.dumps(logger.notes()))
""",
        mode,
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert len(found) == notes
    told = "wandb is not logged in (`wandb login`): runs stay offline\n" if notes == 3 else ""
    assert done.stderr == told
    folders = [path.name.split("-")[0] for path in (tmp_path / "runs").glob("*/wandb/*run-*-*")]
    assert folders == ([] if made is None else [made] * 2)


def test_wandb_with_an_account_is_online_and_offline_where_it_cannot_connect(tmp_path):
    done = run_wandb(
        tmp_path,
        """
import wandb
wandb.login = lambda **options: options == {"prompt": False, "verify": False}
made, init = [], wandb.init
def stub(**options):
    made.append(options["mode"])
    if options["mode"] == "online":
        raise wandb.errors.CommError("no route\\nand more")
    return init(**options)
wandb.init = stub
logger = Wandb()
for seed in range(2):
    logger.start(run(seed))
    logger.finish("failed", {})
print(json.dumps([made, logger.notes()[2:]]))
""",
    )
    remark = "wandb cannot go online (no route): runs stay offline"
    assert (done.returncode, done.stderr) == (0, f"{remark}\n")
    assert json.loads(done.stdout) == [["online", "offline", "offline"], [remark]]


def test_wandb_fields_are_checked():
    with pytest.raises(FieldError) as caught:
        registry.find("loggers", "wandb")(mode="sometimes", project="a/b")
    assert [field for field, _ in caught.value.faults] == ["mode", "project"]


def test_one_logger_has_one_session_and_two_have_two():
    first, second = Wandb(), Wandb()
    assert first == second
    assert first._session is first._session
    assert first._session is not second._session


def test_the_line_to_upload_is_fit_for_a_shell():
    one = [Path("my runs/s/a-1/wandb/offline-run-1-x")]
    assert _glob_argument(one) == "'my runs/s/a-1/wandb/offline-run-1-x'"
    assert _location(one) == "my runs/s/a-1/wandb/offline-run-1-x"
    two = [*one, Path("my runs/s/b-2/wandb/offline-run-2-y")]
    assert _glob_argument(two) == "'my runs/s'/*/wandb/offline-run-*"
    assert _location(two) == "2 runs under my runs/s"
    same = [Path("r/a/wandb/offline-run-1-x"), Path("r/a/wandb/offline-run-2-y")]
    assert _glob_argument(same) == "r/a/wandb/offline-run-*"


class Sent:
    """Stands for a W&B run: what it was told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.summary: dict[str, object] = {}

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_rows_are_sent_to_wandb_together_late_ones_at_once_and_all_before_the_end(
    monkeypatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("gradsurg.loggers.wandb.monotonic", lambda: clock[0])
    logger = Wandb()
    run: Any = Sent()
    logger._session.run, logger._session.sent_at = run, clock[0]
    counts = []
    for step in range(1, 14):
        logger.log(step, {"train/loss": 0.5})
        counts.append(len(run.rows))
    assert counts == [0] * 9 + [10] * 4
    clock[0] += 2
    logger.log(14, {"train/loss": 0.5})
    assert len(run.rows) == 14
    logger.log(15, {"train/loss": 0.5})
    logger.finish("finished", {"test/loss": 1.0})
    assert [row["global_step"] for row in run.rows] == list(range(1, 16))
