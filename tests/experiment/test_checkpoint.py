"""Runs that were interrupted, resumed from a checkpoint."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import yaml

import gradsurg as gs
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.optimization import make_optimizer, make_schedule
from gradsurg.experiment.run import Run
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
    kept_in,
    lines,
    notes,
    raising,
    untimed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Record:
    return execute(a_run(MIXED), tmp_path_factory.mktemp("whole"), [])


def torn_at(step: int, tmp_path, run: Run | None = None) -> RunDirectory:
    """The directory of a run that was interrupted in the step."""
    run = run or a_run(MIXED)
    with pytest.raises(KeyboardInterrupt):
        execute(replace(run, task=Wrapped(step, "interrupt")), tmp_path, [])
    return RunDirectory(run.directory(tmp_path))


@pytest.mark.parametrize("step", [1, 10, 11, 14, 15, 30])
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, whole, step) -> None:
    directory = torn_at(step, tmp_path)
    assert not directory.finished
    assert (directory.load_checkpoint() or {"step": 0})["step"] == (step - 1) // 10 * 10
    assert_same(execute(a_run(MIXED), tmp_path, []), whole)


CONF = Path(__file__).parents[2] / "conf"
CHECKPOINTS = ("checkpoint.pt", "checkpoint_previous.pt")


def flip_a_bit(directory: RunDirectory, name: str) -> None:
    content = bytearray((directory.path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory.path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (CHECKPOINTS[:1], "earlier version: trying checkpoint_previous.pt"),
        (CHECKPOINTS, "earlier version: the run starts from step 0"),
    ],
)
def test_a_damaged_checkpoint_is_told_and_the_run_ends_the_same(
    tmp_path, whole, caplog, names, message
) -> None:
    directory = torn_at(25, tmp_path)
    for name in names:
        flip_a_bit(directory, name)
    logger = Listening()
    record = execute(a_run(MIXED), tmp_path, [logger])
    resumed = message.endswith("previous.pt")
    assert record.action == ("resumed" if resumed else "trained")
    assert logger.begun[0].resumed is resumed
    assert len(caplog.messages) == len(names)
    assert message in caplog.messages[-1]
    assert_same(record, whole)


REMEMBERS = gs.Threshold(0.15, "max_abs", release=0.1) & gs.Probability(0.8, per="site")
RUNS = {
    "tests": a_run(gs.Clip(0.05), schedule=replace(SHORT, eval_every=5)),
    "few effects": a_run(gs.Clip(0.01), schedule=replace(SHORT, effects_every=12)),
    "a memory": a_run(gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05)), when=REMEMBERS),
    "changed nothing": a_run(gs.Clip(1e9)),
    "changed nothing at first": a_run(gs.Clip(1e9), when=gs.Steps(stop=6)),
    "never fired": a_run(gs.Zero(), when=gs.Steps(start=99)),
    "labels": a_run(gs.Route(), at=gs.Outputs("hidden.0.linear")),
}
MARKS = {"warmup_cosine": [7], "multi_step": [7, 20], "warmup_stable_decay": [7, 20]}


def configured(path: Path) -> Run:
    """A run with an optimizer or a schedule of `conf/`, whose milestones are early."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "optimizer":
        return replace(a_run(gs.Clip(0.05)), make_optimizer=partial(make_optimizer, config))
    config |= {"milestones": MARKS[path.stem]} if path.stem in MARKS else {}
    make_lr_schedule = partial(make_schedule, config, SHORT.steps)
    return replace(a_run(gs.Clip(0.05)), make_lr_schedule=make_lr_schedule)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "step"), [*product(RUNS, (5, 13, 21))])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path, name: str, step: int) -> None:
    record = assert_resumes(
        lambda at: replace(RUNS[name], task=Wrapped(at, "raise")), tmp_path, step
    )
    rows = lines(record, "effects.jsonl")
    assert len(notes(record)) == (
        name in ("changed nothing", "changed nothing at first", "never fired")
    )
    if name == "few effects":
        assert [row["calls"] for row in rows][::4] == [5, 10, 10]
    if name == "a memory":
        calls, seen = (sum(int(str(row[name])) for row in rows) for name in ("calls", "seen"))
        assert 0.1 * seen < calls < 0.9 * seen


PATHS = [path for kind in ("optimizer", "schedule") for path in sorted(CONF.glob(f"{kind}/*.yaml"))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_run_with_any_optimizer_or_schedule_resumes(tmp_path, path: Path) -> None:
    run = configured(path)
    record = assert_resumes(lambda at: replace(run, task=Wrapped(at, "raise")), tmp_path, 15)
    if path.parent.name == "schedule" and path.stem != "constant":
        assert kept_in(record.directory)["lr_schedule"]["last_epoch"] == SHORT.steps


@pytest.mark.parametrize(("step", "layers"), [(5, 1), (21, 1), (21, 7)])
def test_a_resumed_run_logs_all_earlier_rows_again(tmp_path, step, layers) -> None:
    expected, torn, resumed = Listening(), Listening(), Listening()
    run = a_run(MIXED)
    run = replace(run, make_model=lambda data: MLP(data.input_shape, 10, hidden=(16,) * layers))
    execute(run, tmp_path / "whole", [expected])
    # Of many sites the loggers get the means alone.
    assert ("effect/clip/mean/cosine" in expected.logged[0][1]) == (layers == 7)
    run = replace(run, task=Wrapped(step, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [torn])
    execute(run, tmp_path / "torn", [resumed])
    assert len(torn.logged) == (step - 1) // 5
    sent, whole = (
        [(at, untimed(values)) for at, values in one.logged] for one in (resumed, expected)
    )
    assert sent == whole


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [10, 20, 30]), (1e6, [30])])
def test_checkpoints_are_at_least_checkpoint_seconds_apart_except_the_last(
    tmp_path, monkeypatch, seconds: float, saved: list[int]
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(
        RunDirectory, "save_checkpoint", lambda _, state: steps.append(state["step"])
    )
    execute(a_run(gs.Clip(0.1), schedule=replace(SHORT, checkpoint_seconds=seconds)), tmp_path, [])
    assert steps == saved


def without_summary(run, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Torn):
        patch.setattr(RunDirectory, "write_summary", raising)
        execute(run, tmp_path, [])


def test_a_run_interrupted_after_its_last_step_trains_no_more_steps(
    tmp_path, whole, monkeypatch
) -> None:
    without_summary(a_run(MIXED), tmp_path, monkeypatch)
    task = Wrapped()
    record = execute(a_run(MIXED, task=task), tmp_path, [])
    assert task.calls == []
    assert_same(record, whole)
    assert record.summary["time/step_ms"] is None


@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs(), gs.Nodes("*")], ids=repr)
def test_notes_of_a_resumed_run_cover_all_its_steps(tmp_path, monkeypatch, at) -> None:
    """Bites in the first steps only: after the interruption it changes nothing and never fires."""
    run = a_run(gs.Scale(0.5), at, gs.Steps(stop=6))
    expected = execute(run, tmp_path / "whole", [])
    assert notes(expected) == []
    torn_at(21, tmp_path / "torn", run)
    without_summary(run, tmp_path / "late", monkeypatch)
    for place in ("torn", "late"):
        assert_same(execute(run, tmp_path / place, []), expected)


def test_a_run_resumed_with_another_version_has_a_note(tmp_path, monkeypatch) -> None:
    before = environment()
    assert known(torn_at(15, tmp_path).path / "run.json")["made_with"] == before
    now = {**before, "numpy": "0.0.1"}
    monkeypatch.setattr("gradsurg.experiment.run_identity.environment", lambda: now)
    record = execute(a_run(MIXED), tmp_path, [])
    begins = f"resumed from a checkpoint made with numpy {before['numpy']}, now numpy 0.0"
    assert record.note.startswith(begins)
    assert notes(record) == [record.note]


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


@pytest.mark.parametrize(("name", "line"), [("metrics.jsonl", b"3"), ("effects.jsonl", b'{"step')])
def test_a_broken_row_before_the_checkpoint_is_an_error_that_names_the_file(
    tmp_path, name: str, line: bytes
) -> None:
    directory = torn_at(15, tmp_path)
    content = (directory.path / name).read_bytes()
    (directory.path / name).write_bytes(line + b"\n" + content[len(line) + 1 :])
    with pytest.raises(ValueError, match=rf"^{name} "):
        execute(a_run(MIXED), tmp_path, [])
    assert directory.state == "failed"
    assert name in directory.reason
