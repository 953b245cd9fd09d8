"""The command as a user types it: what it prints, where it writes, how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradsurg import run
from gradsurg.build import GROUPS

SHORT = ("steps=20", "seeds=1", "sink=none")
THEIRS = """
from torch import nn

import gradsurg as gs


def halve(grad):
    return grad / 2


def total(grad):
    return grad.sum()


class Interrupts:
    calls = 0

    def __call__(self, grad):
        Interrupts.calls += 1
        if Interrupts.calls > 60:
            raise KeyboardInterrupt
        return grad / 2


def fails_late(grad):
    Interrupts.calls += 1
    if Interrupts.calls > 60:
        raise RuntimeError("the disk\\nis on fire")
    return grad / 2


def make_model(shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))
"""


@dataclass(frozen=True)
class Ended:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def command(folder: Path, *words: str) -> Ended:
    """The command in a process of its own, from `folder`."""
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "gradsurg.run", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one, with a module of a user's own."""
    (tmp_path / "their_module.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_module", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.fixture
def here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Here":
    return Here(monkeypatch, capsys)


@dataclass(frozen=True)
class Here:
    """The command in this process, which is quicker, from the folder with `their_module`."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Ended:
        self.monkeypatch.setattr(sys, "argv", ["run.py", *words])
        self.capsys.readouterr()
        code = 0
        try:
            run.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        out, err = self.capsys.readouterr()
        return Ended(code, out, err)


def runs(folder: Path, study: str = "default") -> list[str]:
    """The run directories of a study without their hashes."""
    return sorted(path.name.rpartition("-")[0] for path in (folder / "runs" / study).iterdir())


def finished(folder: Path) -> list[str]:
    return sorted(path.parent.name.rpartition("-")[0] for path in folder.rglob("summary.json"))


def test_a_users_callable_in_the_current_folder_is_run_and_warned_of_once(folder: Path) -> None:
    ended = command(folder, "transform=[clip,their_module.halve]", *SHORT)
    assert ended.code == 0
    assert ended.out.startswith("clip+halve: test accuracy ")
    assert "the control arm" in ended.out
    assert re.fullmatch(r"warning: halve is a plain callable: [^\n]*\n", ended.err)
    assert runs(folder) == finished(folder) == ["clip+halve-seed0", "none-seed0"]


def test_wrong_input_ends_with_code_2_and_a_line_for_each_fault(folder: Path) -> None:
    ended = command(folder, "transform=[clip,clop]", "transform.clip.value=-1", "lr=0", *SHORT)
    assert ended.code == 2
    assert ended.out == ""
    keys = [line.partition(": ")[0] for line in ended.err.splitlines()]
    assert keys == ["transform", "lr", "transform.clip.value"]
    assert not (folder / "runs").exists()


def test_ctrl_c_ends_a_run_with_one_line_and_code_130(folder: Path) -> None:
    words = ["transform=clip", "steps=1000000", "seeds=1", "sink=none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradsurg.run", *words, "checkpoint_every=1", "log_every=1"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(folder.rglob("checkpoint.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == "interrupted; the same command goes on from the last checkpoint\n"
    assert out == ""
    assert process.returncode == 130


@pytest.mark.parametrize(
    "words",
    [
        ("transform=null",),
        ("transform=clip,noise",),
        ("-m", "transform=clip,noise", "lr=-1,-2"),
        ("transform=[clip",),
        ("transform=their_modul.halve",),
        ("--config-dir", "no", "transform=clip"),
    ],
    ids=" ".join,
)
def test_wrong_input_leaves_no_folder_and_no_traceback(
    here: Here, folder: Path, words: tuple[str, ...]
) -> None:
    ended = here(*words)
    assert ended.code == 2
    assert ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "runs").exists()


def test_a_plan_prints_the_sites_and_trains_nothing(here: Here, folder: Path) -> None:
    ended = here("transform=clip", "plan=true", "site.pattern=*.bias", "sink=none")
    marked = [line.split()[1] for line in ended.out.splitlines() if line.startswith("*")]
    assert marked == ["hidden.0.linear.bias", "hidden.1.linear.bias", "output.bias"]
    assert not (folder / "runs").exists()


def test_a_sweep_runs_all_combinations(here: Here, folder: Path) -> None:
    ended = here("-m", "transform=none,clip,their_module.halve", "seed=range(0,3)", *SHORT)
    assert ended.code == 0
    expected = [f"{name}-seed{seed}" for name in ("clip", "halve", "none") for seed in range(3)]
    assert runs(folder) == finished(folder) == expected
    assert ended.out.count("\nclip: test accuracy") == 3


def test_finished_runs_are_not_repeated_unless_forced(here: Here, folder: Path) -> None:
    here("transform=clip", *SHORT)
    (summary,) = folder.glob("runs/default/clip-*/summary.json")
    first = summary.stat().st_mtime_ns
    again = here("transform=clip", *SHORT)
    assert again.out.endswith("2 of them had been finished before; force=true repeats them\n")
    assert summary.stat().st_mtime_ns == first
    forced = here("transform=clip", "force=true", *SHORT)
    assert "finished before" not in forced.out
    assert summary.stat().st_mtime_ns > first


def test_options_may_stand_behind_overrides(here: Here, folder: Path) -> None:
    (folder / "confs" / "transform").mkdir(parents=True)
    (folder / "confs" / "transform" / "mine.yaml").write_text("mine:\n  name: sign\n")
    behind = here("transform=mine", "--config-dir", "confs", *SHORT)
    assert behind.out.startswith("mine: test accuracy ")
    before = here("--config-dir", "confs", "transform=mine", "plan=true", *SHORT)
    assert before.out.startswith("mine at Parameters(")


def test_a_users_model_is_trained(here: Here) -> None:
    ended = here("transform=clip", "model=their_module.make_model", *SHORT)
    assert ended.code == 0
    assert "\n1.weight " in ended.out


def test_help_mentions_each_group_and_five_commands(here: Here) -> None:
    ended = here("--help")
    assert ended.code == 0
    assert ended.out.count("  python -m gradsurg.run ") == 5
    described = ended.out.partition("Groups:")[2].partition("\n\ntransform:")[0]
    missing = [group for group in GROUPS if group not in described]
    assert not missing
    assert "clip_global_norm" in ended.out


def test_what_a_transform_raises_is_told_in_one_line(here: Here, folder: Path) -> None:
    ended = here("transform=their_module.total", *SHORT)
    assert ended.code == 1
    assert ended.out == ""
    warning, line = ended.err.splitlines()
    assert warning.startswith("warning: total is a plain callable")
    (log,) = folder.glob("runs/default/total-*/error.log")
    assert line.startswith("total, seed 0: TypeError: total: total must return a tensor like the ")
    assert "site 'output.bias', step 0" in line
    assert line.endswith(f" (the traceback is in {log.relative_to(folder)})")
    assert log.read_text().startswith("Traceback (most recent call last):\n")
    assert "unfit" in log.read_text()


def test_a_run_that_failed_goes_on_once_its_cause_is_gone(here: Here, folder: Path) -> None:
    words = ("transform=their_module.fails_late", "checkpoint_every=1", "log_every=1", *SHORT)
    ended = here(*words)
    assert ended.code == 1
    assert "RuntimeError: the disk is on fire; while fails_late acted at site " in ended.err
    assert re.search(r"site '[\w.]+', step 10 \(", ended.err)
    (log,) = folder.glob("runs/default/*/error.log")
    rows = (log.parent / "metrics.jsonl").read_text()
    sys.modules["their_module"].Interrupts.calls = -1000
    assert here(*words).code == 0
    assert not log.exists()
    assert (log.parent / "metrics.jsonl").read_text().startswith(rows)
    assert (log.parent / "summary.json").is_file()


def test_an_interrupt_inside_a_transform_ends_the_same_way(here: Here, folder: Path) -> None:
    words = ("transform=their_module.Interrupts", "checkpoint_every=1", "log_every=1", *SHORT)
    ended = here(*words)
    assert ended.code == 130
    assert ended.err.splitlines()[1:] == [
        "interrupted; the same command goes on from the last checkpoint"
    ]
    assert finished(folder) == ["none-seed0"]


def test_hydras_full_error_still_gives_the_traceback(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(TypeError, match="must return a tensor like the gradient"):
        here("transform=their_module.total", *SHORT)


def test_a_job_that_fails_does_not_stop_the_others_of_a_sweep(here: Here, folder: Path) -> None:
    ended = here("-m", "transform=their_module.total,clip", *SHORT)
    assert ended.code == 1
    assert finished(folder) == ["clip-seed0", "none-seed0"]
    assert "Traceback" not in ended.err
    lines = ended.err.splitlines()
    assert [line for line in lines if line.startswith("total, seed 0: TypeError: ")]
    assert "the runs above failed, the other jobs have been run" in lines


def test_a_folder_that_cannot_be_written_is_a_line(here: Here) -> None:
    ended = here("transform=clip", "out=/proc/no/runs", *SHORT)
    assert ended.code in (1, 2)
    assert "Traceback" not in ended.err
    assert "/proc/no" in ended.err


def test_notes_of_an_error_stand_behind_it() -> None:
    error = ValueError("one\n  two")
    error.add_note("while clip acted")
    assert run._sentence(error) == "ValueError: one two; while clip acted"
    assert run._sentence(ValueError()) == "ValueError: no message"


def test_overrides_are_put_behind_options() -> None:
    words = ["a=1", "--config-dir", "there", "b=2", "-m", "~c"]
    assert run._options_first(words) == ["--config-dir", "there", "-m", "~c", "a=1", "b=2"]
