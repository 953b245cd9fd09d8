"""Runs on real digits: what they write, that they resume, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradsurg.experiments.liu2021.task import CAGradToy
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.config.build import build
from gradsurg.config.compose import CONFIG_DIR, plain, register
from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.loggers.base import Guarded, Logger, RunInfo, State
from gradsurg.models.mlp import MLP
from gradsurg.models.point import Point
from gradsurg.sites.base import Selector
from gradsurg.surgery.intervention import Intervention
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, Task
from gradsurg.tasks.digits import Digits
from gradsurg.training import logging
from gradsurg.training.run import Run, Schedule
from gradsurg.training.run_directory import RunDirectory
from gradsurg.training.run_identity import environment, run_hash
from gradsurg.training.study import Record, execute, suggested_bounds
from gradsurg.transforms.base import Transform
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger
from tests.test_loggers import alone, inspect, of_type, rows

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Schedule(steps=30, batch_size=32, log_every=5, checkpoint_every=10, effects_every=4)


TIMES = ("seconds",)  # of a checkpoint


class Torn(Exception):
    """What interrupts a run in these tests."""


@dataclass(frozen=True)
class Wrapped(Task):
    """Digits whose loss at call `at` (from 1) raises, kills the process, or is NaN."""

    at: int = 0
    does: str = ""
    calls: list[int] = field(default_factory=list)

    def load(self) -> Data:
        return Digits().load()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls.append(1)
        loss = Digits().loss(outputs, targets)
        if len(self.calls) == self.at:
            match self.does:
                case "raise":
                    raise Torn
                case "interrupt":
                    raise KeyboardInterrupt
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "nan" and len(self.calls) >= self.at:
            return loss * float("nan")
        if self.does == "one nan" and len(self.calls) == self.at:
            return loss + float("nan")  # whose gradient is that of the loss
        if self.does == "warn":
            warnings.warn("mine", UserWarning, stacklevel=1)
        return loss

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return Digits().metrics(outputs, targets)


def make_model(data: Data) -> nn.Module:
    return MLP(data.input_shape, data.num_outputs, hidden=(16,), dropout=0.3)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def a_run(
    transform: Transform | None = None,
    at: Selector | None = None,
    when: Trigger | None = None,
    seed: int = 0,
    task: Task | None = None,
    schedule: Schedule = SHORT,
) -> Run:
    """The run of one arm; without a transform it is the control."""
    where = at or gs.Parameters()
    if transform is None:
        surgery = Surgery(Intervention(gs.Identity(), where, names=("none",)), seed=seed)
    else:
        surgery = Surgery(Intervention(transform, where, when or Always()), seed=seed)
    label = type(transform).__name__.lower() if transform is not None else "none"
    return Run(
        study="study",
        arm="control" if transform is None else "treated",
        label=label,
        seed=seed,
        identity={"label": label, "transform": repr(transform), "seed": seed},
        tags=(label,),
        task=task or Digits(),
        make_model=make_model,
        make_optimizer=make_optimizer,
        surgery=surgery,
        shadow=transform is None,
        schedule=schedule,
        device=torch.device("cpu"),
    )


def read(record: Record, name: str) -> str:
    return (record.directory / name).read_text()


def lines(record: Record, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in read(record, name).splitlines()]


def untimed(numbers: Mapping[str, object]) -> dict[str, object]:
    return {
        key: value
        for key, value in numbers.items()
        if not key.startswith("time/") and key not in TIMES
    }


def assert_same(found: Record, expected: Record) -> None:
    """The two ended alike, bit by bit, apart from times."""
    assert found.directory != expected.directory
    for name in ("metrics.jsonl", "effects.jsonl", "conflicts.jsonl"):
        rows = [
            [untimed(row) for row in RunDirectory(record.directory).read_rows(name)]
            for record in (found, expected)
        ]
        assert rows[0] == rows[1]
    assert untimed(found.summary) == untimed(expected.summary)
    kept, whole = (
        RunDirectory(record.directory).load_checkpoint() or {} for record in (found, expected)
    )
    assert all(isinstance(state[key], float) for state in (kept, whole) for key in TIMES)
    assert flat(untimed(kept)) == flat(untimed(whole))


def flat(thing: object) -> object:
    """A checkpoint as something that `==` compares bit by bit."""
    match thing:
        case Tensor():
            return str(thing.dtype), thing.tolist()
        case dict():
            return {key: flat(value) for key, value in thing.items()}
        case list() | tuple():
            return [flat(value) for value in thing]
        case _:
            return thing


class Listening(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[RunInfo] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[tuple[str, dict[str, float]]] = []

    def start(self, run: RunInfo) -> None:
        self.begun.append(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        self.ended.append((state, dict(summary)))

    def abandon(self) -> None: ...

    def notes(self) -> list[str]:
        return []


def test_a_run_writes_its_files_into_a_directory_of_its_own(tmp_path) -> None:
    run = a_run(gs.Clip(0.01))
    record = execute(run, tmp_path, [])
    assert record.directory == tmp_path / "study" / f"clip-seed0-{run_hash(run.identity)}"
    names = {path.name for path in record.directory.iterdir()}
    assert names == {
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "effects.jsonl",
        "summary.json",
        "checkpoint.pt",
    }
    metrics = lines(record, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [5, 10, 15, 20, 25, 30]
    effects = lines(record, "effects.jsonl")
    sites = [name for name, _ in make_model(Digits().load()).named_parameters()]
    assert [(row["step"], row["site"]) for row in effects] == [
        (step, site) for step in (5, 10, 15, 20, 25, 30) for site in sites
    ]
    assert {row["transform"] for row in effects} == {"clip"}
    assert [row["sampled"] for row in effects[:: len(sites)]] == [2, 1, 1, 1, 2, 1]
    assert set(EFFECT_NAMES) < set(effects[0])
    assert json.loads(read(record, "summary.json")) == record.summary
    expected = {"state": "finished", "arm": "treated", "label": "clip", "seed": 0, "steps": 30}
    assert {key: record.summary[key] for key in expected} == expected
    assert record.summary["notes"] == []
    outcomes = {f"{part}/{name}" for part in ("train", "test") for name in ("loss", "accuracy")}
    assert outcomes < set(record.summary)
    assert record.action == "trained"


def test_a_run_whose_task_has_a_landscape_writes_it_and_logs_where_it_was(tmp_path) -> None:
    task = CAGradToy(start=(1.0, -2.0))
    schedule = replace(SHORT, eval_every=10)
    run = replace(a_run(task=task, schedule=schedule), make_model=make_point)
    record = execute(run, tmp_path, [])
    assert RunDirectory(record.directory).read_landscape() == task.landscape()
    rows = [row for row in lines(record, "metrics.jsonl") if "test/x1" in row]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert {"test/x2", "test/loss_1", "test/loss_2"} < set(rows[0])
    assert rows[-1]["test/x2"] == record.summary["test/x2"] != -2.0


def make_point(data: Data) -> nn.Module:
    return Point(data.input_shape, data.num_outputs, start=data.start or ())


def test_a_logger_is_told_what_the_files_hold(tmp_path) -> None:
    logger, run = Listening(), a_run(gs.Clip(0.01))
    record = execute(run, tmp_path, [logger])
    (info,) = logger.begun
    assert (info.study, info.arm, info.label) == ("study", "treated", "clip-seed0")
    assert (info.directory, info.total_steps) == (record.directory, 30)
    told = [{"step": step, "train/loss": values["train/loss"]} for step, values in logger.logged]
    assert told == lines(record, "metrics.jsonl")
    assert_effects_match(dict(logger.logged), lines(record, "effects.jsonl"))
    ((state, summary),) = logger.ended
    assert state == "finished"
    numbers = {k: v for k, v in record.summary.items() if isinstance(v, int | float)}
    assert summary == numbers
    assert "test/accuracy" in summary


def assert_effects_match(
    logged: Mapping[int, Mapping[str, object]], effects: Sequence[Mapping[str, object]]
) -> None:
    """Every number of every row is under `effect/<transform>/<site>/<number>`, and no other."""
    expected: dict[int, dict[str, object]] = {step: {} for step in logged}
    for row in effects:
        step = row["step"]
        assert isinstance(step, int)
        prefix = f"effect/{row['transform']}/{row['site']}"
        expected[step] |= {
            f"{prefix}/{name}": row[name] for name in ("seen", "calls", *EFFECT_NAMES)
        }
    found = {
        step: {key: value for key, value in values.items() if key.startswith("effect/")}
        for step, values in logged.items()
    }
    assert found == expected
    assert any(found.values())


@pytest.mark.parametrize(
    ("transform", "when"),
    [
        (gs.Clip(1e9), None),
        (gs.Identity(), None),
        (gs.AddNoise(1.0), gs.Steps(start=10**6)),
        (gs.AddNoise(1.0), gs.Steps(start=29, every=2)),
    ],
    ids=["clip", "identity", "noise that never fires", "noise at the last step"],
)
def test_the_arms_differ_by_the_transform_alone(tmp_path, transform, when) -> None:
    control = execute(a_run(), tmp_path, [])
    treated = execute(a_run(transform, when=when), tmp_path, [])
    outcome = ("train/loss", "test/loss", "test/accuracy")
    same = lines(treated, "metrics.jsonl") == lines(control, "metrics.jsonl")
    assert same  # dropout and batches are those of the control
    alike = [treated.summary[key] == control.summary[key] for key in outcome]
    assert all(alike) == (when != gs.Steps(start=29, every=2))


def test_another_seed_is_another_run(tmp_path) -> None:
    one, two = (execute(a_run(seed=seed), tmp_path, []) for seed in (0, 1))
    assert one.directory != two.directory
    assert lines(one, "metrics.jsonl") != lines(two, "metrics.jsonl")


MIXED = gs.Chain(gs.GrokfastEMA(), gs.AddNoise(0.001), gs.Clip(0.05))
INTERRUPTED = [1, 5, 10, 11, 14, 15, 21, 30]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Record:
    return execute(a_run(MIXED), tmp_path_factory.mktemp("whole"), [])


@pytest.mark.parametrize("step", INTERRUPTED)
def test_a_run_that_raised_and_is_run_again_ends_as_if_it_never_had(tmp_path, whole, step) -> None:
    run = a_run(MIXED, task=Wrapped(step, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path, [])
    assert not RunDirectory(run.directory(tmp_path)).finished
    kept = RunDirectory(run.directory(tmp_path)).load_checkpoint()
    assert (kept or {"step": 0})["step"] == (step - 1) // 10 * 10
    assert_same(execute(run, tmp_path, []), whole)


REMEMBERS = gs.Threshold(0.15, "max_abs", release=0.1) & gs.Probability(0.8, per="site")


@pytest.mark.parametrize("step", [5, 11, 15, 21])
def test_a_trigger_that_remembers_or_draws_resumes_too(tmp_path, step: int) -> None:
    transform = gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05))
    record = execute(a_run(transform, when=REMEMBERS), tmp_path / "whole", [])
    rows = lines(record, "effects.jsonl")
    calls, seen = (sum(int(str(row[name])) for row in rows) for name in ("calls", "seen"))
    assert 0.1 * seen < calls < 0.9 * seen
    kept = RunDirectory(record.directory).load_checkpoint() or {}
    surgery: Any = kept["surgery"]
    memories = [state for key, state in surgery["states"].items() if key.endswith("/when")]
    assert {value.item() for state in memories for value in state.values()} == {True, False}
    with pytest.raises(Torn):
        execute(a_run(transform, when=REMEMBERS, task=Wrapped(step, "raise")), tmp_path, [])
    assert_same(execute(a_run(transform, when=REMEMBERS), tmp_path, []), record)


@pytest.mark.parametrize("step", [5, 14, 21])
def test_a_logger_of_a_resumed_run_hears_of_all_steps(tmp_path, step) -> None:
    expected, torn, resumed = Listening(), Listening(), Listening()
    execute(a_run(MIXED), tmp_path / "whole", [expected])
    run = a_run(MIXED, task=Wrapped(step, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [torn])
    execute(run, tmp_path / "torn", [resumed])
    assert len(torn.logged) == (step - 1) // 5
    told = [(at, untimed(values)) for at, values in resumed.logged]
    assert told == [(at, untimed(values)) for at, values in expected.logged]


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [10, 20, 30]), (1e6, [30])])
def test_a_run_is_not_saved_more_often_than_asked_for_but_at_its_end(
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


def test_a_run_may_be_torn_again_and_again(tmp_path, whole) -> None:
    for step in (12, 8, 4):
        with pytest.raises(Torn):
            execute(a_run(MIXED, task=Wrapped(step, "raise")), tmp_path, [])
    assert_same(execute(a_run(MIXED), tmp_path, []), whole)


def test_a_run_torn_after_its_last_step_needs_no_step_more(tmp_path, whole, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_summary", raising)
        with pytest.raises(Torn):
            execute(a_run(MIXED), tmp_path, [])
    task = Wrapped()
    record = execute(a_run(MIXED, task=task), tmp_path, [])
    assert task.calls == []
    assert_same(record, whole)
    assert record.summary["time/step_ms"] is None


def raising(*args: object) -> None:
    raise Torn


KILLED = """
from pathlib import Path
from typing import Any
from gradsurg.training.study import execute
from tests.test_study import MIXED, Wrapped, a_run
execute(a_run(MIXED, task=Wrapped(17, "kill")), Path("."), [], threads=1)
"""


def test_a_killed_run_that_is_run_again_ends_as_if_it_never_had_been(tmp_path, whole) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    place = a_run(MIXED).directory(tmp_path)
    half = place / "metrics.jsonl"
    assert len(half.read_text().splitlines()) == 3
    with half.open("a") as file:
        file.write('{"step":20,"train/lo')
    with (place / "effects.jsonl").open("a") as file:
        file.write("{")
    assert_same(execute(a_run(MIXED), tmp_path, []), whole)


def test_what_is_sampled_seldom_resumes_too(tmp_path) -> None:
    schedule = replace(SHORT, effects_every=12)
    expected = execute(a_run(gs.Clip(0.01), schedule=schedule), tmp_path / "whole", [])
    run = a_run(gs.Clip(0.01), schedule=schedule, task=Wrapped(13, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [])
    assert_same(execute(run, tmp_path / "torn", []), expected)
    calls = [row["calls"] for row in lines(expected, "effects.jsonl")][::4]
    assert calls == [5, 10, 10]


@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs(), gs.Nodes("*")], ids=repr)
@pytest.mark.parametrize("step", [21, 31])
def test_what_a_run_has_to_tell_is_of_the_whole_run(tmp_path, monkeypatch, at, step) -> None:
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
def test_the_notes_of_a_resumed_run_are_those_of_a_whole_one(tmp_path, transform, when) -> None:
    expected = execute(a_run(transform, when=when), tmp_path / "whole", [])
    assert len(notes(expected)) == 1
    run = a_run(transform, when=when, task=Wrapped(21, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [])
    assert_same(execute(run, tmp_path / "torn", []), expected)


@pytest.mark.parametrize("name", ["gradsurg", "torch", "numpy", "python"])
def test_a_run_that_goes_on_with_another_version_says_so(tmp_path, monkeypatch, name: str) -> None:
    run = a_run(MIXED, task=Wrapped(15, "raise"))
    with pytest.raises(Torn):
        execute(run, tmp_path, [])
    place = RunDirectory(run.directory(tmp_path))
    facts, before = place.known_facts(), environment()
    assert facts["made_with"] == before
    now = {**before, name: "0.0.1"}
    monkeypatch.setattr("gradsurg.training.run_identity.environment", lambda: now)
    record = execute(run, tmp_path, [])
    (note,) = notes(record)
    begins = f"resumed from a checkpoint made with {name} {before[name]}, now {name} 0.0"
    assert note.startswith(begins)
    assert record.note == note


def test_what_a_run_is_made_with_has_the_source_of_gradsurg(tmp_path, monkeypatch) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "one.py").write_text("x = 1\n")
    monkeypatch.setattr("gradsurg.training.run_identity.PACKAGE", tmp_path)
    first = environment.__wrapped__()
    (tmp_path / "inside" / "one.py").write_text("x = 2\n")
    second = environment.__wrapped__()
    assert first.pop("gradsurg") != second.pop("gradsurg")
    assert first == second


def notes(record: Record) -> list[str]:
    found = record.summary["notes"]
    assert isinstance(found, list)
    return found


def test_a_finished_run_is_not_repeated_unless_it_was_cleared(tmp_path) -> None:
    run = a_run(gs.GrokfastEMA(), task=(task := Wrapped()))
    first = execute(run, tmp_path, [])
    before = {path: path.read_bytes() for path in first.directory.glob("*.jsonl")}
    done = len(task.calls)
    logger = Listening()
    again = execute(run, tmp_path, [logger])
    assert again.action == "skipped"
    assert again.summary == first.summary
    assert len(task.calls) == done
    assert logger.begun == []
    RunDirectory(first.directory).clear()
    forced = execute(run, tmp_path, [logger])
    assert forced.action == "trained"
    assert len(task.calls) == 2 * done
    assert untimed(forced.summary) == untimed(first.summary)
    assert {path: path.read_bytes() for path in first.directory.glob("*.jsonl")} == before


@pytest.mark.parametrize("task", [Wrapped(), Wrapped(7, "raise"), Wrapped(1, "raise")], ids=repr)
def test_generator_and_threads_are_afterwards_what_they_were(tmp_path, task) -> None:
    torch.manual_seed(123)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run = replace(a_run(gs.AddNoise(), task=task), make_model=seen_by_threads(threads + 1))
    try:
        execute(run, tmp_path, [], threads=threads + 1)
    except Torn:
        assert task.does == "raise"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def seen_by_threads(wanted: int):
    def make(data: Data) -> nn.Module:
        assert torch.get_num_threads() == wanted
        return make_model(data)

    return make


def test_the_state_of_the_global_generator_does_not_matter(tmp_path) -> None:
    records = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        records.append(execute(a_run(MIXED), tmp_path / str(seed), []))
    assert_same(*records)


def test_a_loss_that_is_nan_ends_the_run_as_diverged(tmp_path) -> None:
    logger = Listening()
    record = execute(a_run(gs.Clip(0.1), task=Wrapped(12, "nan")), tmp_path, [logger])
    assert record.summary["state"] == "diverged"
    assert record.summary["steps"] == 15
    assert record.summary["diverged_step"] == 12
    assert logger.ended[0][0] == "diverged"
    assert [row["train/loss"] is None for row in lines(record, "metrics.jsonl")] == [0, 0, 1]
    assert lines(record, "metrics.jsonl")[-1]["not_finite"] == "train/loss=nan"
    assert lines(record, "effects.jsonl")[-1]["nonfinite"]
    assert execute(a_run(gs.Clip(0.1)), tmp_path, []).action == "skipped"


@pytest.mark.parametrize("log_every", [1, 7, 30])
@pytest.mark.parametrize("most", [1000, 4])
def test_the_first_loss_that_is_not_finite_is_told_however_seldom_is_logged(
    tmp_path, monkeypatch, log_every: int, most: int
) -> None:
    monkeypatch.setattr(logging, "MAX_PENDING_LOSSES", most)
    run = a_run(gs.Clip(0.1), task=Wrapped(12, "one nan"))
    schedule = replace(run.schedule, log_every=log_every)
    record = execute(replace(run, schedule=schedule), tmp_path, [])
    assert record.summary["state"] == "diverged"
    assert record.summary["diverged_step"] == 12


def test_a_run_broken_by_its_very_last_step_is_diverged_too(tmp_path) -> None:
    record = execute(a_run(gs.Scale(1e38), when=gs.Steps(start=29)), tmp_path, [])
    assert all("not_finite" not in row for row in lines(record, "metrics.jsonl"))
    assert record.summary["state"] == "diverged"


class Rude(Listening):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def start(self, run: RunInfo) -> None:
        self._maybe("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._maybe("log")

    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        self._maybe("finish")

    def _maybe(self, name: str) -> None:
        if name == self.where:
            raise ConnectionError(name)


@pytest.mark.parametrize("where", ["start", "log", "finish"])
@pytest.mark.parametrize("guard", [True, False])
def test_a_logger_that_raises_never_kills_training(tmp_path, where, guard) -> None:
    plain, other = execute(a_run(), tmp_path / "a", []), Listening()
    rude: Logger = Guarded(Rude(where)) if guard else Rude(where)
    assert_same(execute(a_run(), tmp_path / "b", [rude, other]), plain)
    assert len(other.logged) == 6
    assert other.ended[0][0] == "finished"


def test_a_logger_hears_of_a_run_that_failed(tmp_path) -> None:
    logger = Listening()
    with pytest.raises(Torn):
        execute(a_run(task=Wrapped(12, "raise")), tmp_path, [logger])
    assert logger.ended == [("failed", {})]


def test_a_run_whose_summary_cannot_be_written_is_not_told_as_finished(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(RunDirectory, "write_summary", raising)
    logger = Listening()
    with pytest.raises(Torn):
        execute(a_run(), tmp_path, [logger])
    assert [state for state, _ in logger.ended] == ["failed"]


def test_warnings_of_others_are_passed_on_once(tmp_path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        execute(a_run(task=Wrapped(does="warn")), tmp_path, [])
    assert [str(item.message) for item in caught] == ["mine"]


def test_a_transform_that_changes_nothing_is_told_with_a_bound_that_does(tmp_path) -> None:
    (note,) = notes(execute(a_run(gs.Clip(1e9)), tmp_path, []))
    assert note.startswith(
        "clip changed nothing at the steps measured, one in 4. Quantiles of |g|: 50% "
    )
    words = note.partition("A bound of ")[2].split()
    entries, norms = float(words[0]), float(words[5])
    for transform in (gs.Clip(entries), gs.ClipNorm(norms)):
        record = execute(a_run(transform), tmp_path, [])
        changed = [row["changed"] for row in lines(record, "effects.jsonl")]
        assert any(changed), transform
        assert notes(record) == []


@pytest.mark.parametrize(
    ("quantiles", "norms"),
    [
        ([1.0, 1.0, 1.0, 1.0], [2.0]),
        ([0.0, 0.0, 0.0, 0.0304], [0.0, 0.0, 0.0304]),
        ([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0]),
        ([0.0995, 0.0995, 0.0995, 0.0995], [0.0995, 0.0995]),
        ([1e-30, 2e-30, 3e-30, 3e-30], [1e-29]),
    ],
)
def test_a_bound_that_is_said_to_bite_is_below_the_largest_also_as_printed(
    quantiles: list[float], norms: list[float]
) -> None:
    words = suggested_bounds(quantiles, norms).split()
    assert 0 < float(words[3]) < quantiles[-1]
    assert 0 < float(words[8]) < max(norms)


def test_gradients_that_are_all_zero_have_no_bound(tmp_path) -> None:
    chain = gs.Chain(gs.Zero(), gs.Clip(0.01))
    (note,) = notes(execute(a_run(chain), tmp_path, []))
    assert note.startswith("clip changed nothing at the steps measured, one in 4.")
    assert note.endswith("norms from 0 to 0. The gradients were zero.")


def test_each_link_that_changes_nothing_is_told_by_itself(tmp_path) -> None:
    chain = gs.Chain(gs.Clip(1e9), gs.Scale(0.5), gs.Clip(1e8))
    found = notes(execute(a_run(chain), tmp_path, []))
    starts = [note.partition(".")[0] for note in found]
    where = "at the steps measured, one in 4"
    assert starts == [f"clip changed nothing {where}", f"clip_2 changed nothing {where}"]


def test_a_trigger_that_never_fired_is_told(tmp_path) -> None:
    record = execute(a_run(gs.Clip(0.01), when=gs.Steps(start=10**6)), tmp_path, [])
    assert notes(record) == ["clip: its trigger never fired in 120 gradients"]
    rows = lines(record, "effects.jsonl")
    assert {(row["calls"], row["norm_before"]) for row in rows} == {(0, None)}
    assert sum(row["seen"] for row in rows) == 120


def test_a_control_has_nothing_to_tell(tmp_path) -> None:
    assert notes(execute(a_run(), tmp_path, [])) == []


def test_the_default_clip_changes_five_to_twenty_five_percent_of_all_entries(tmp_path) -> None:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = plain(hydra_compose("config", ["transform=clip", "seed=0", "logger=none"]))
    experiment = build(config)
    (pair,) = experiment.pairs
    assert pair.treated is not None
    record = execute(pair.treated, tmp_path, [], threads=experiment.settings.threads)
    sizes = {name: param.numel() for name, param in experiment.make_model().named_parameters()}
    changed = total = 0.0
    for row in lines(record, "effects.jsonl"):
        fraction, sampled = row["changed"], row["sampled"]
        assert isinstance(fraction, float)
        assert isinstance(sampled, int)
        changed += fraction * sampled * sizes[str(row["site"])]
        total += sampled * sizes[str(row["site"])]
    assert total == sum(sizes.values()) * 50
    assert 0.05 <= changed / total <= 0.25


WITH_WANDB = """
from pathlib import Path
from typing import Any
import gradsurg as gs
from gradsurg.loggers.wandb import Wandb
from gradsurg.training.study import execute
from tests.test_study import a_run
for transform in (gs.Clip(0.01), None):
    execute(a_run(transform), Path("."), [Wandb(mode="offline")], threads=1)
"""


def test_a_wandb_run_has_the_numbers_of_the_files(tmp_path) -> None:
    subprocess.run(
        [sys.executable, "-c", WITH_WANDB],
        cwd=tmp_path,
        env=alone(tmp_path),
        check=True,
        timeout=120,
    )
    for run in (a_run(gs.Clip(0.01)), a_run()):
        place = run.directory(tmp_path)
        (path,) = place.glob("wandb/offline-run-*")
        record = Record(run, place, RunDirectory(place).read_summary(), "trained")
        told = inspect(tmp_path, path)
        (begun,) = of_type(told, "run")
        assert [begun[key] for key in ("run_group", "job_type", "display_name")] == [
            "study",
            run.arm,
            f"{run.label}-seed0",
        ]
        logged = {row["global_step"]: row for row in rows(told)}
        losses = [{"step": step, "train/loss": row["train/loss"]} for step, row in logged.items()]
        assert losses == lines(record, "metrics.jsonl")
        assert_effects_match(logged, lines(record, "effects.jsonl"))
        last = {}
        for update in of_type(told, "summary"):
            last |= update["update"]
        for key in ("state", "test/accuracy", "test/loss", "train/accuracy", "train/loss"):
            assert last[key] == record.summary[key], key


def test_loggers_are_told_that_a_run_was_interrupted_and_not_that_it_failed(tmp_path: Path) -> None:
    logger = Listening()
    with pytest.raises(KeyboardInterrupt):
        execute(a_run(task=Wrapped(12, "interrupt")), tmp_path, [logger])
    assert logger.ended == [("interrupted", {})]
    assert RunDirectory(a_run().directory(tmp_path)).state == "interrupted"
