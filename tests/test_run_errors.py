"""How the command ends when a run fails or is interrupted, and how it goes on afterwards."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from gradsurg.experiment import run_directory
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.overrides import prepared
from gradsurg.plugins.messages import full_message
from tests.conftest import Here
from tests.runs import ROOT

SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")
OFTEN = ("checkpoint_every=1", "checkpoint_seconds=0", "log_every=1")
LINE = "interrupted; the same command resumes from the last checkpoint"


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "gradsurg.run", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(folder: Path) -> list[str]:
    return sorted(path.parent.name.rpartition("-")[0] for path in folder.rglob("summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize("end", [">&- 2>&-", ">/dev/full"])
def test_closed_and_full_streams_lose_no_run(folder: Path, end: str) -> None:
    words = " ".join(("transform=clip", *SHORT))
    command = f"{sys.executable} -m gradsurg.run {words} {end}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, check=False)
    told = b"the output cannot be written: No space left on device\n" if "full" in end else b""
    assert (done.returncode, done.stderr) == (0, told)
    assert len([*folder.glob("runs/digits-mlp/*/summary.json")]) == 2


def test_a_run_that_is_a_link_out_of_its_study_is_told_and_the_others_are_trained(
    here: Here, folder: Path
) -> None:
    words = ("transform=clip", "steps=1", *SHORT[1:])
    assert here(*words).code == 0
    (linked,), (other,) = (folder.glob(f"runs/*/{label}-seed0-*") for label in ("clip", "none"))
    linked.rename(folder / "target")
    (folder / "target" / "summary.json").unlink()
    before = (folder / "target" / "metrics.jsonl").read_bytes()
    linked.symlink_to(folder / "target")
    (other / "summary.json").unlink()
    ended = here(*words)
    assert ended.code == 1
    line = f"clip, seed 0: ForeignLink: {linked.name} is a link out of the folder of the study"
    assert ended.err.count(line) == 1
    assert f"(remove the link {linked.relative_to(folder)})" in ended.err
    assert (other / "summary.json").is_file()
    assert (folder / "target" / "metrics.jsonl").read_bytes() == before
    assert not (folder / "target" / "summary.json").exists()


def test_a_folder_of_tuning_runs_that_is_a_link_out_of_its_study_is_refused(
    here: Here, folder: Path
) -> None:
    (folder / "target").mkdir()
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "runs" / "first" / "tuning").symlink_to(folder / "target")
    ended = here("transform=clip", "study=first", "tune='lr=[0.1,0.2]'", "tune_seeds=1", *SHORT)
    assert ended.code == 2
    assert ended.err.startswith("study: tuning is a link out of the folder of the study")
    assert list((folder / "target").iterdir()) == []


def test_the_next_command_removes_what_a_killed_one_left(here: Here, folder: Path) -> None:
    words = ("transform=clip", "steps=1", *SHORT[1:])
    assert here(*words).code == 0
    (run,) = folder.glob("runs/*/clip-seed0-*")
    left = [run / ".lock", run / "checkpoint_previous.pt", run / ".summary.json.1.tmp"]
    for path in left:
        path.touch()
    assert here(*words).code == 0
    assert [path for path in left if path.exists()] == []


def test_an_unwritable_folder_is_reported_in_one_line(here: Here) -> None:
    ended = here("transform=clip", "out=/proc/no/runs", *SHORT)
    assert ended.code in (1, 2)  # root sees only the failing write
    (line,) = ended.err.splitlines()
    assert "/proc" in line


MOUNT = shutil.which("unshare") and ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]


def on_a_disk(folder: Path, script: str) -> list[tuple[int, list[str], list[str]]]:
    """Run `script` with `disk`, a small file system that is gone afterwards.

    Its function `run` executes the command; return the code and the lines of out and err of each.
    """
    if not MOUNT or subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    (folder / "disk").mkdir()
    script = f"""
number=0
run() {{
    number=$((number + 1)); code=0
    {sys.executable} -m gradsurg.run "$@" logger=none out=disk/runs \\
        > $number.out 2> $number.err || code=$?
    echo $code
}}
mount -t tmpfs -o size=2m none disk
{script}"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*MOUNT, script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    texts = [
        [(folder / f"{number}.{stream}").read_text(encoding="utf-8") for stream in ("out", "err")]
        for number in range(1, 1 + len(done.stdout.split()))
    ]
    return [
        (int(code), out.splitlines(), err.splitlines())
        for code, (out, err) in zip(done.stdout.split(), texts, strict=True)
    ]


READ_ONLY = """
run transform=clip steps=20 seeds=1
mount -o remount,ro disk
run transform=clip steps=20 seeds=1
run -m transform=clip steps=20 seeds=1
run transform=clip steps=30 seeds=1
"""


@pytest.mark.slow
def test_a_read_only_study_is_skipped_if_it_is_finished_and_else_refused(folder: Path) -> None:
    first, again, sweep, new = on_a_disk(folder, READ_ONLY)
    assert first[0] == again[0] == sweep[0] == 0
    assert again[1][0] == first[1][0]
    assert len(again[2]) == 1
    assert sweep[2][0] == "1 job, 2 runs: 2 finished before, skipped"
    for _, _, (*_, line) in (again, sweep):
        assert line.startswith("the report cannot be written: ")
        assert "Read-only file system" in line
    assert again[1][-1] == "2 of them had been finished before; force=true repeats them"
    code, out, (line,) = new
    assert (code, out) == (2, [])
    assert line.startswith("out: cannot be written to: [Errno 30] Read-only file system: ")


FULL = """
run transform=clip steps=20 seeds=1 report=false
cat disk/runs/digits-mlp/*/summary.json > before
room=$(df --output=avail disk | tail -n 1)
head -c $(((room - 60) * 1024)) /dev/zero > disk/other
run transform=clip steps=20 seeds=3 checkpoint_every=1 checkpoint_seconds=0 log_every=1 report=false
cat disk/runs/digits-mlp/*/summary.json > after
rm disk/other
run transform=clip steps=20 seeds=3 report=false
"""


@pytest.mark.full
def test_a_full_disk_is_a_line_a_run_and_nothing_finished_is_lost(folder: Path) -> None:
    first, full, again = on_a_disk(folder, FULL)
    assert first[0] == again[0] == 0
    code, out, err = full
    assert code == 1
    assert re.match(r"FAILED: \d of 3 runs of the control arm. The first: OSError: ", out[0])
    assert any(line.startswith("Test accuracy of clip minus control at lr ") for line in out)
    _, *lines, count = err  # the first says that three seeds are few
    assert count == "4 of 6 runs failed"
    assert all("[Errno 28] No space left on device: '" in line for line in lines)
    runs = [line.partition(":")[0] for line in lines if not line.startswith("the traceback could ")]
    assert runs == ["none, seed 1", "clip, seed 1", "none, seed 2", "clip, seed 2"]
    before, after = ((folder / name).read_text(encoding="utf-8") for name in ("before", "after"))
    assert after == before
    assert {line.partition(":")[2] for line in again[2][1:]} == {" failed before, tried again"}


def test_ctrl_c_ends_a_run_with_one_line_and_code_130(folder: Path) -> None:
    words = ("transform=clip", "steps=1000000", "seeds=1", "logger=none", *OFTEN)
    process = started(folder, *words)
    deadline = time.monotonic() + 60
    while not any(folder.rglob("checkpoint.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", f"{LINE}\n")


def test_an_interrupt_inside_a_transform_ends_the_same_way(here: Here, folder: Path) -> None:
    ended = here("transform=their_module.interrupts", *OFTEN, *SHORT)
    assert ended.code == 130
    assert ended.err.splitlines() == [LINE]
    assert finished(folder) == ["none-seed0"]


def test_an_error_of_a_transform_is_printed_in_one_line(here: Here, folder: Path) -> None:
    ended = here("transform=their_module.total", *SHORT[:-1])
    assert ended.code == 1
    assert ended.out.splitlines()[-1] == "report: runs/digits-mlp/report/index.html"
    line, count = ended.err.splitlines()
    assert count == "1 of 2 runs failed"
    (log,) = folder.glob("runs/digits-mlp/total-*/error.log")
    assert line.startswith("total, seed 0: TypeError: total: return a tensor like the gradient")
    assert "site 'output.bias', step 0" in line
    assert line.endswith(f" (the traceback is in {log.relative_to(folder)})")
    assert log.read_text(encoding="utf-8").startswith("Traceback (most recent call last):\n")
    assert "in _train" in log.read_text(encoding="utf-8")


def test_a_traceback_that_could_not_be_written_is_not_named(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file = run_directory.replace_file

    def full(path: Path, content: bytes, previous: Path | None = None) -> None:
        if path.name == run_directory.ERROR:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace_file(path, content, previous)

    here("transform=their_module.total", *SHORT)  # leaves the traceback of an earlier attempt
    monkeypatch.setattr(run_directory, "replace_file", full)
    ended = here("transform=their_module.total", *SHORT)
    assert ended.code == 1
    (line,) = (line for line in ended.err.splitlines() if line.startswith("total, seed 0: "))
    assert line.endswith(" (the traceback could not be written)")
    assert not list(folder.glob("runs/digits-mlp/total-*/error.log"))


def test_a_transform_that_fails_at_its_first_gradient_fails_before_a_control_is_trained(
    here: Here, folder: Path
) -> None:
    ended = here("transform=their_module.refuses", *SHORT)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("transform.refuses: ")
    assert "RuntimeError: not this one; while refuses acted at site 'output.bias', step 0" in line
    assert re.search(r"\(their_module.py, line \d+\)$", line)
    assert not (folder / "runs").exists()


def test_a_nan_of_a_transform_is_blamed_on_its_site_and_step(here: Here) -> None:
    ended = here("transform=their_module.makes_nan", *SHORT)
    assert ended.code == 1
    assert ended.out.startswith(
        "FAILED: makes_nan returned NaN or infinity for a finite gradient at site 'output.bias', "
    )
    assert "step 0, and\n  the run diverged" in ended.out


def test_a_nan_of_a_transform_is_blamed_in_a_sweep_too(here: Here) -> None:
    ended = here("-m", "transform=their_module.makes_nan,clip", *SHORT)
    assert ended.code == 1
    (line,) = [line for line in ended.out.splitlines() if "returned NaN" in line]
    assert line.startswith("transform=their_module.makes_nan")
    assert line.endswith("at site 'output.bias', step 0")


def test_a_failed_arm_leaves_the_table_of_its_finished_controls(here: Here) -> None:
    every = [here("transform=their_module.total", *SHORT) for _ in range(2)]
    for ended in every:
        assert ended.code == 1
        failure, _, table = ended.out.partition("\n\n")
        assert failure.startswith("FAILED: 1 of 1 run of total. The first: TypeError: total: ")
        assert "error.log" in failure
        assert table.startswith("There is no treated arm to compare: 1 of 1 run finished.")
        assert "control  test accuracy  1 " in table
        assert "output.bias" in ended.out
    skipped = ["1 of them had been finished before" in ended.out for ended in every]
    assert skipped == [False, True]


def test_a_run_that_failed_goes_on_once_its_cause_is_gone(here: Here, folder: Path) -> None:
    words = ("transform=their_module.fails", *OFTEN, *SHORT)
    ended = here(*words)
    assert ended.code == 1
    assert "RuntimeError: the disk is on fire; while fails acted at site '" in ended.err
    assert re.search(r"site '[\w.]+', step 10 \(", ended.err)
    (log,) = folder.glob("runs/digits-mlp/*/error.log")
    rows = (log.parent / "metrics.jsonl").read_text(encoding="utf-8")
    assert rows.count("\n") == 10
    sys.modules["their_module"].calls = -1000
    assert here(*words).code == 0
    assert not log.exists()
    assert (log.parent / "metrics.jsonl").read_text(encoding="utf-8").startswith(rows)
    # Ten steps of six parameters: it did not begin anew.
    assert sys.modules["their_module"].calls == -1000 + 60
    assert (log.parent / "summary.json").is_file()


def test_hydras_full_error_gives_the_traceback_of_hydra(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(MissingConfigException, match="Could not find 'transform/clop'"):
        here("transform=clop")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_config_name_of_a_users_own_that_is_not_there_is_wrong_input(here: Here) -> None:
    ended = here("--config-name", "other", "transform=clip")
    assert ended.code == 2
    assert "other" in ended.err
    assert "Traceback" not in ended.err


def test_notes_of_an_error_stand_behind_it() -> None:
    error = ValueError("one\n  two")
    error.add_note("while clip acted")
    assert full_message(error) == "ValueError: one two; while clip acted"
    assert full_message(ValueError()) == "ValueError: no message"


def test_a_launcher_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a process of torchrun
    with pytest.raises(ConfigError, match="torchrun$"):
        prepared(["transform=clip", "-m", "hydra/launcher=joblib"])


def test_a_fault_of_gradsurg_itself_is_no_wrong_command_line(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise IndexError("ours")

    monkeypatch.setattr("gradsurg.experiment.command.report_study", broken)
    monkeypatch.setattr("gradsurg.experiment.job.report_study", broken)
    for words in (("transform=clip",), ("-m", "transform=clip")):
        ended = here(*words, *SHORT[:-1])
        assert ended.code == 1
        assert ended.err.endswith("IndexError: ours\n")


def test_runs_that_all_diverge_before_their_first_log_are_reported(here: Here) -> None:
    words = ("optimizer.lr=1e30", "transform=none", "control=none", "log_every=5")
    ended = here(*words, *SHORT[:-1])
    assert (ended.code, "Traceback" in ended.err) == (0, False)
    assert ended.out.endswith("report: runs/digits-mlp/report/index.html\n")
