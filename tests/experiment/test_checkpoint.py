"""Runs that were interrupted, resumed from a checkpoint."""

from dataclasses import replace
from typing import Any

import pytest

import gradsurg as gs
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_identity import environment
from gradsurg.experiment.run_reader import known
from gradsurg.models.mlp import MLP
from tests.runs import (
    MIXED,
    SHORT,
    Listening,
    Torn,
    Wrapped,
    a_run,
    assert_resumes,
    assert_same,
    lines,
    notes,
    raising,
    untimed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


INTERRUPTED = [1, 10, 11, 14, 15, 30]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Record:
    return execute(a_run(MIXED), tmp_path_factory.mktemp("whole"), [])


@pytest.mark.parametrize("step", INTERRUPTED)
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, whole, step) -> None:
    run = a_run(MIXED, task=Wrapped(step, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path, [])
    assert not RunDirectory(run.directory(tmp_path)).finished
    checkpoint = RunDirectory(run.directory(tmp_path)).load_checkpoint()
    assert (checkpoint or {"step": 0})["step"] == (step - 1) // 10 * 10
    assert_same(execute(run, tmp_path, []), whole)


@pytest.mark.parametrize(
    "damaged", [["checkpoint.pt"], ["checkpoint.pt", "checkpoint_previous.pt"]]
)
def test_a_run_with_a_damaged_checkpoint_ends_like_an_uninterrupted_one(
    tmp_path, whole, caplog, damaged: list[str]
) -> None:
    run = a_run(MIXED, task=Wrapped(25, "interrupt"))
    with pytest.raises(KeyboardInterrupt):
        execute(run, tmp_path, [])
    for name in damaged:
        path = run.directory(tmp_path) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    logger = Listening()
    record = execute(run, tmp_path, [logger])
    resumed = len(damaged) == 1
    assert record.action == ("resumed" if resumed else "trained")
    assert logger.begun[0].resumed is resumed
    assert len(caplog.messages) == len(damaged)
    assert_same(record, whole)


REMEMBERS = gs.Threshold(0.15, "max_abs", release=0.1) & gs.Probability(0.8, per="site")


@pytest.mark.parametrize("step", [5, 15])
def test_a_trigger_with_state_or_random_draws_resumes(tmp_path, step: int) -> None:
    transform = gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05))
    record = assert_resumes(
        lambda at: a_run(transform, when=REMEMBERS, task=Wrapped(at, "raise")), tmp_path, step
    )
    rows = lines(record, "effects.jsonl")
    calls, seen = (sum(int(str(row[name])) for row in rows) for name in ("calls", "seen"))
    assert 0.1 * seen < calls < 0.9 * seen
    checkpoint = RunDirectory(record.directory).load_checkpoint() or {}
    surgery: Any = checkpoint["surgery"]
    memories = [state for key, state in surgery["states"].items() if key.endswith("/when")]
    assert {value.item() for state in memories for value in state.values()} == {True, False}


@pytest.mark.parametrize(("step", "layers"), [(5, 1), (21, 1), (21, 7)])
def test_a_resumed_run_logs_all_earlier_rows_again(tmp_path, step, layers) -> None:
    expected, torn, resumed = Listening(), Listening(), Listening()
    run = a_run(MIXED)
    run = replace(run, make_model=lambda data: MLP(data.input_shape, 10, hidden=(16,) * layers))
    record = execute(run, tmp_path / "whole", [expected])
    assert ("effect/clip/mean/cosine" in expected.logged[0][1]) == (layers == 7)
    sites = {row["site"] for row in lines(record, "effects.jsonl")}
    assert len(sites) == 2 * layers + 2
    run = replace(run, task=Wrapped(step, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [torn])
    execute(run, tmp_path / "torn", [resumed])
    assert len(torn.logged) == (step - 1) // 5
    sent = [(at, untimed(values)) for at, values in resumed.logged]
    assert sent == [(at, untimed(values)) for at, values in expected.logged]


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [10, 20, 30]), (1e6, [30])])
def test_checkpoints_are_at_least_checkpoint_seconds_apart_except_the_last(
    tmp_path, monkeypatch, seconds: float, saved: list[int]
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(
        RunDirectory, "save_checkpoint", lambda self, state: steps.append(state["step"])
    )
    run = a_run(gs.Clip(0.1))
    schedule = replace(run.schedule, checkpoint_seconds=seconds)
    execute(replace(run, schedule=schedule), tmp_path, [])
    assert steps == saved


def test_a_run_interrupted_after_its_last_step_trains_no_more_steps(
    tmp_path, whole, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_summary", raising)
        with pytest.raises(Torn):
            execute(a_run(MIXED), tmp_path, [])
    task = Wrapped()
    record = execute(a_run(MIXED, task=task), tmp_path, [])
    assert task.calls == []
    assert_same(record, whole)
    assert record.summary["time/step_ms"] is None


def test_effects_sampled_at_few_steps_resume(tmp_path) -> None:
    schedule = replace(SHORT, effects_every=12)
    expected = assert_resumes(
        lambda at: a_run(gs.Clip(0.01), schedule=schedule, task=Wrapped(at, "raise")), tmp_path, 13
    )
    calls = [row["calls"] for row in lines(expected, "effects.jsonl")][::4]
    assert calls == [5, 10, 10]


@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs(), gs.Nodes("*")], ids=repr)
@pytest.mark.parametrize("step", [21, 31])
def test_notes_of_a_resumed_run_cover_all_its_steps(tmp_path, monkeypatch, at, step) -> None:
    """Bites in the first steps only: after the interruption it changes nothing and never fires."""
    when = gs.Steps(stop=6)
    expected = execute(a_run(gs.Scale(0.5), at, when), tmp_path / "whole", [])
    assert notes(expected) == []
    run = a_run(gs.Scale(0.5), at, when, task=Wrapped(step, "raise"))
    with monkeypatch.context() as patch, pytest.raises(Torn):
        patch.setattr(RunDirectory, "write_summary", raising)
        execute(run, tmp_path / "torn", [])
    assert_same(execute(run, tmp_path / "torn", []), expected)


@pytest.mark.parametrize(
    ("transform", "when"),
    [(gs.Clip(1e9), None), (gs.Clip(1e9), gs.Steps(stop=6)), (gs.Zero(), gs.Steps(start=99))],
    ids=["changed nothing", "changed nothing at first", "never fired"],
)
def test_a_resumed_run_has_the_notes_of_an_uninterrupted_one(tmp_path, transform, when) -> None:
    expected = assert_resumes(
        lambda at: a_run(transform, when=when, task=Wrapped(at, "raise")), tmp_path, 21
    )
    assert len(notes(expected)) == 1


def test_a_run_resumed_with_another_version_has_a_note(tmp_path, monkeypatch) -> None:
    name = "numpy"
    run = a_run(MIXED, task=Wrapped(15, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path, [])
    place = RunDirectory(run.directory(tmp_path))
    facts, before = known(place.path / "run.json"), environment()
    assert facts["made_with"] == before
    now = {**before, name: "0.0.1"}
    monkeypatch.setattr("gradsurg.experiment.run_identity.environment", lambda: now)
    record = execute(run, tmp_path, [])
    (note,) = notes(record)
    begins = f"resumed from a checkpoint made with {name} {before[name]}, now {name} 0.0"
    assert note.startswith(begins)
    assert record.note == note


@pytest.mark.parametrize(
    "content", [b"", b"null", b'{"state": "fini'], ids=["empty", "null", "half"]
)
def test_a_run_with_a_broken_summary_is_trained_again(tmp_path, whole, content: bytes) -> None:
    run = a_run(MIXED)
    execute(run, tmp_path, [])
    (run.directory(tmp_path) / "summary.json").write_bytes(content)
    record = execute(run, tmp_path, [])
    assert record.action == "retried"
    assert record.reason.startswith("summary.json ")
    assert_same(record, whole)


@pytest.mark.parametrize(
    ("name", "line"), [("metrics.jsonl", b"3"), ("effects.jsonl", b'{"step')], ids=["3", "half"]
)
def test_a_broken_row_before_the_checkpoint_is_an_error_that_names_the_file(
    tmp_path, name: str, line: bytes
) -> None:
    run = a_run(MIXED, task=Wrapped(15, "interrupt"))
    with pytest.raises(KeyboardInterrupt):
        execute(run, tmp_path, [])
    path = run.directory(tmp_path) / name
    content = path.read_bytes()
    line = line[: len(content) - 2]
    path.write_bytes(line + b"\n" + content[len(line) + 1 :])
    with pytest.raises(ValueError, match=rf"^{name} "):
        execute(run, tmp_path, [])
    directory = RunDirectory(run.directory(tmp_path))
    assert directory.state == "failed"
    assert name in directory.reason
