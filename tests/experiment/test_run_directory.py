"""The files of a run: written safely, read back, locked."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
from hashlib import sha256
from io import BytesIO
from threading import Thread

import pytest
import torch
import yaml

from gradsurg.experiment import run_directory
from gradsurg.experiment.run_directory import FORMAT, RunDirectory, remove_leftovers
from gradsurg.experiment.run_reader import BrokenFile, ForeignLink, known, read, read_rows
from tests.runs import effect


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "study" / "clip-12345678")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(run):
    return [row["step"] for row in run.read_rows("metrics.jsonl")]


def test_a_second_process_waits_for_the_lock_of_a_run(run, caplog):
    order = []

    def second():
        with RunDirectory(run.path).lock():
            order.append("second")
            order.extend(path.name for path in run.path.iterdir())

    with run.lock():
        waiting = Thread(target=second)
        waiting.start()
        while not caplog.messages:
            assert not order
            assert waiting.is_alive()
        order.append("first")
    waiting.join()
    assert caplog.messages == [f"waiting for another process that has locked {run.path}"]
    assert order == ["first", "second", ".lock"]
    assert list(run.path.iterdir()) == []


def test_the_lock_is_released_after_an_error_and_drafts_are_removed(run):
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    (run.path / ".summary.json.99.tmp").write_text("of a killed process", encoding="utf-8")
    with run.lock():
        assert [path.name for path in run.path.iterdir()] == [".lock"]


FOREIGN = ("metrics.jsonl", "checkpoint.pt", "checkpoint_previous.pt", "config.yaml", ".lock")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_with_a_link_out_of_its_study_is_failed_and_not_written(run, tmp_path, name):
    target = tmp_path / "target"
    target.write_text("theirs", encoding="utf-8")
    run.path.mkdir(parents=True)
    (run.path / name).symlink_to(target)
    reason = f"{name} is a link out of the folder of the study, which is not followed"
    assert (run.state, run.reason) == ("failed", reason)
    with pytest.raises(ForeignLink, match=reason), run.lock():
        run.load_checkpoint()
    assert target.read_text(encoding="utf-8") == "theirs"


def test_a_run_that_is_a_link_out_of_its_study_is_not_written(run, tmp_path):
    (tmp_path / "target").mkdir()
    run.path.parent.mkdir()
    run.path.symlink_to(tmp_path / "target")
    with pytest.raises(ForeignLink, match=run.path.name), run.lock():
        run.clear()
    assert run.is_foreign
    assert list((tmp_path / "target").iterdir()) == []


def test_a_study_may_be_a_link_itself(run, tmp_path):
    (tmp_path / "disk").mkdir()
    run.path.parent.symlink_to(tmp_path / "disk")
    with run.lock():
        run.append("metrics.jsonl", [{"step": 1}])
    assert steps(run) == [1]
    assert not run.is_foreign


LEFT = (".lock", ".summary.json.123.tmp", "checkpoint_previous.pt")


def killed(run, *, ended):
    """The files of a run that was killed."""
    run.append("metrics.jsonl", [{"step": 1}])
    if ended:
        run.write_summary({"state": "finished"})
    for name in LEFT:
        (run.path / name).touch()


def test_what_a_killed_process_left_is_removed_from_its_study(run):
    study = run.path.parent
    tuned, mine = (RunDirectory(study / name) for name in ("tuning/clip-12345678", "mine"))
    for one in (run, tuned, mine):
        killed(one, ended=True)
    (study / "report" / ".draft-x" / "figures").mkdir(parents=True)
    remove_leftovers(study)
    for one in (run, tuned):
        names = {path.name for path in one.path.iterdir()}
        assert names == {"metrics.jsonl", "summary.json"}
    assert {*LEFT} < {path.name for path in mine.path.iterdir()}, "it is not a run"
    assert list((study / "report").iterdir()) == []


def test_the_checkpoint_before_the_last_of_an_interrupted_run_stays(run):
    killed(run, ended=False)
    remove_leftovers(run.path.parent)
    assert {path.name for path in run.path.iterdir()} == {"metrics.jsonl", LEFT[-1]}


def test_the_files_of_a_run_that_another_process_trains_stay(run):
    killed(run, ended=True)
    command = (
        "import sys\nfrom gradsurg.experiment.run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).lock():\n    print(1, flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        (run.path / LEFT[1]).touch()
        remove_leftovers(run.path.parent)
        assert {*LEFT} < {path.name for path in run.path.iterdir()}
        other.communicate(b"")
    remove_leftovers(run.path.parent)
    assert not {*LEFT} & {path.name for path in run.path.iterdir()}


def test_the_config_is_read_back_and_not_replaced(run):
    run.plan({}, {"lr": 1e-6, "model": {"hidden": (64, 64)}, "when": None, "path": "a: b"})
    expected = {"lr": 1e-6, "model": {"hidden": [64, 64]}, "when": None, "path": "a: b"}
    run.plan({}, {"lr": 1})
    assert yaml.safe_load((run.path / "config.yaml").read_bytes()) == expected


def test_facts_are_merged_with_those_of_earlier_commands(run):
    assert read(run.path / "run.json") is None
    plain = {"controls": {"plain": "none-seed0-00000000"}}
    run.plan({"arm": "treated", "command": ["a"], "looked": 3, **plain}, {})
    run.plan({"arm": "treated", "controls": {"placebo": "p"}}, {})
    both = {"control": "none-seed0-00000000", "controls": {**plain["controls"], "placebo": "p"}}
    expected = {"command": ["a"], "looked": 3, "arm": "treated", **both}
    assert known(run.path / "run.json") == expected
    run.add_facts({"arm": "other", "controls": {}, "measured": {"margin": "1%"}})
    later = {"measured": {"margin": "1%"}, "margin_after": True}
    assert known(run.path / "run.json") == expected | later
    run.plan({"arm": "treated", **plain}, {})
    assert known(run.path / "run.json") == expected | {"margin_after": True}


def test_rows_are_lines_and_a_number_that_is_not_finite_is_null_and_listed(run):
    nan, inf = float("nan"), float("inf")
    row = {"a": -inf, "n": [1.0, inf], "c": [[nan], [-1]], "o": {"m": {"c": nan}}}
    run.append("conflicts.jsonl", [{"step": 10, "a": 0.1}, row])
    run.append("conflicts.jsonl", [])
    first, second = lines(run.path / "conflicts.jsonl")
    assert first == {"step": 10, "a": 0.1}
    assert second.pop("not_finite") == "a=-inf n.1=inf c.0.0=nan o.m.c=nan"
    assert second == {"a": None, "n": [1.0, None], "c": [[None], [-1]], "o": {"m": {"c": None}}}


def test_summary_makes_a_run_finished_and_removes_the_checkpoint_before_the_last(run):
    for step in (10, 20):
        run.save_checkpoint({"step": step})
    assert not run.finished
    assert run.read_summary() == {}
    run.write_summary({"state": "diverged", "test/loss": float("inf"), "sites": ("a", "b")})
    assert run.finished
    assert run.read_summary() == {"state": "diverged", "test/loss": None, "sites": ["a", "b"]}
    assert sorted(path.name for path in run.path.glob("*.pt")) == ["checkpoint.pt"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_partly_written_summary_does_not_finish_a_run(run, monkeypatch, moment):
    def stop(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run.path.mkdir(parents=True)
    monkeypatch.setattr(os, moment, stop)
    with pytest.raises(OSError, match=r"No space left on device: '.*summary\.json'"):
        run.write_summary({"state": "finished"})
    assert not run.finished
    assert list(run.path.iterdir()) == []


def test_a_checkpoint_is_read_back_bit_identical_and_replaced_or_left(run, monkeypatch):
    torch.manual_seed(0)
    weights, generator = torch.randn(3, dtype=torch.float64), torch.random.get_rng_state()
    run.save_checkpoint({"step": 1})
    run.save_checkpoint({"model": {"w": weights}, "rng": generator, "order": [3, 1, 2]})
    monkeypatch.setattr(os, "replace", lambda *_: os.listdir("/does/not/exist"))
    with pytest.raises(FileNotFoundError):
        run.save_checkpoint({"step": 3})
    loaded = run.load_checkpoint()
    assert torch.equal(loaded["model"]["w"], weights)
    assert torch.equal(loaded["rng"], generator)
    assert loaded["order"] == [3, 1, 2]


def test_resuming_drops_rows_after_the_checkpoint(run):
    run.append("metrics.jsonl", [{"step": 10}])
    run.append("effects.jsonl", [effect(10, 5, 5)])
    run.save_checkpoint({"step": 10})
    contents = {file: file.read_bytes() for file in run.path.glob("*.jsonl")}
    run.append("metrics.jsonl", [{"step": 20}])
    run.append("effects.jsonl", [effect(20, 5, 5)])
    run.append("conflicts.jsonl", [{"step": 20}])
    with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 30, "train/lo')
    assert steps(run) == [10, 20]
    assert RunDirectory(run.path).load_checkpoint() == {"step": 10}
    assert {file: file.read_bytes() for file in contents} == contents
    assert run.read_rows("conflicts.jsonl") == []
    (run.path / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 0 bytes but had 12 .*force=true"):
        run.load_checkpoint()
    (run.path / "checkpoint.pt").unlink()
    assert run.load_checkpoint() is None
    assert not any(file.read_bytes() for file in run.path.glob("*.jsonl"))


def sealed(checkpoint) -> bytes:
    """Return the content of a checkpoint file, with its digest."""
    buffer = BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue() + sha256(buffer.getvalue()).digest()


EARLIER = {"state": {"step": 1}, "sizes": {}}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken" * 9, sealed(EARLIER)])
def test_a_checkpoint_that_is_broken_or_of_before_is_a_new_start_with_one_line(
    run, caplog, content
) -> None:
    run.append("metrics.jsonl", [{"step": 1}])
    (run.path / "checkpoint.pt").write_bytes(content)
    assert run.load_checkpoint() is None
    (message,) = caplog.messages
    assert re.search(r"checkpoint\.pt is damaged .* the run starts from step 0$", message)
    assert (run.path / "metrics.jsonl").read_bytes() == b""
    (run.path / "checkpoint.pt").write_bytes(sealed({**EARLIER, "format": FORMAT}))
    assert run.load_checkpoint() == {"step": 1}


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_with_its_rows(run, caplog) -> None:
    for step in (10, 20, 30):
        run.append("metrics.jsonl", [{"step": step}])
        run.save_checkpoint({"step": step})
    path = run.path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-50])
    assert run.load_checkpoint() == {"step": 20}
    assert steps(run) == [10, 20]
    (message,) = caplog.messages
    assert message.endswith("trying checkpoint_previous.pt")
    run.append("metrics.jsonl", [{"step": 31}])
    run.save_checkpoint({"step": 31})  # the damaged one must not become the one before
    path.write_bytes(b"")
    assert run.load_checkpoint() == {"step": 20}
    (run.path / "checkpoint_previous.pt").write_bytes(b"")
    assert run.load_checkpoint() is None
    assert steps(run) == []


def test_a_checkpoint_with_code_in_it_is_not_loaded(run):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(run.path / "executed"),))

    run.path.mkdir(parents=True)
    (run.path / "checkpoint.pt").write_bytes(sealed({"state": Payload(), "sizes": {}}))
    with pytest.raises(Exception, match="Weights only load failed"):
        run.load_checkpoint()
    assert not (run.path / "executed").exists()


def test_clear_removes_the_summary_first_and_leaves_the_facts_and_files_of_others(run, monkeypatch):
    run.clear()
    run.plan({"arm": "treated"}, {"a": 1})
    run.append("metrics.jsonl", [{"step": 1}])
    run.append("effects.jsonl", [effect(1, 1, 1)])
    run.append("conflicts.jsonl", [{"step": 1}])
    run.save_checkpoint({"step": 1})
    run.write_summary({"state": "finished"})
    run.save_checkpoint({"step": 1})
    run.write_error("it broke")
    run.write_json("examined.json", {})
    run.write_examined_effects([])
    (run.path / "wandb").mkdir()
    removed, unlink = [], run_directory.Path.unlink

    def noted(path, **options):
        removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(run_directory.Path, "unlink", noted)
    run.clear()
    assert removed[0] == "summary.json"
    assert sorted(path.name for path in run.path.iterdir()) == ["run.json", "wandb"]


def test_the_state_follows_from_the_files(run):
    assert run.state == "planned"
    run.plan({}, {"lr": 0.1})
    assert run.state == "planned"
    run.append("metrics.jsonl", [{"step": 1}])
    assert run.state == "interrupted"
    run.write_error("Traceback\n  somewhere\nValueError: it\x1b[1m broke\n")
    assert (run.state, run.reason) == ("failed", "ValueError: it\\x1b[1m broke")
    (run.path / "error.log").unlink()
    assert (run.state, run.reason) == ("interrupted", "")
    (run.path / "summary.json").write_text("{half", encoding="utf-8")
    assert run.state == "failed"
    assert run.reason.startswith("summary.json cannot be read: ")
    for state in ("diverged", "finished"):
        run.write_summary({"state": state})
        assert run.state == state


def test_a_run_is_running_until_the_process_with_its_lock_ends(run):
    run.append("metrics.jsonl", [{"step": 1}])
    code = "import sys; from gradsurg.experiment.run_directory import RunDirectory\n"
    code += "with RunDirectory(sys.argv[1]).lock():\n    print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert run.state == "running"
        other.kill()
    assert (run.path / ".lock").exists()
    assert run.state == "interrupted"


def test_a_renamed_file_is_followed_by_a_sync_of_its_folder(run, monkeypatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*paths):
        calls.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    run.save_checkpoint({"step": 1})
    assert calls == ["file", "replace", "folder"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", b"{half"), ("run.json", b"[1]"), ("run.json", b"\xff"), ("config.yaml", b"a: [")],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BrokenFile, match=name + " (cannot be read: |must be a mapping)"):
        read(tmp_path / name)
    assert known(tmp_path / name) == {}
    assert read_rows(tmp_path / "metrics.jsonl") == []
