"""Runs on real digits: their files, their notes, and that the process is left as it was."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gradsurg.experiments.liu2021.task import CAGradToy
from torch import nn

import gradsurg as gs
from gradsurg.effects.numbers import EFFECT_NAMES, EXTREME_NAMES
from gradsurg.experiment import logged_numbers
from gradsurg.experiment.execution import execute
from gradsurg.experiment.idle import suggested_bounds
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_identity import run_hash
from gradsurg.loggers.base import GuardedLogger, Logger
from gradsurg.models.point import Point
from gradsurg.tasks.base import Data
from gradsurg.tasks.digits import Digits
from tests.runs import (
    SHORT,
    Listening,
    Torn,
    Wrapped,
    a_run,
    assert_same,
    lines,
    make_model,
    notes,
    raising,
    read,
    untimed,
)

pytestmark = pytest.mark.usefixtures("one_thread")

IDLE = "changed nothing at the steps measured, one in 4"


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
    assert {*EFFECT_NAMES, *EXTREME_NAMES} < set(effects[0])
    assert json.loads(read(record, "summary.json")) == record.summary
    expected = {"state": "finished", "arm": "treated", "label": "clip", "seed": 0, "steps": 30}
    assert {key: record.summary[key] for key in expected} == expected
    assert record.summary["notes"] == []
    outcomes = {f"{part}/{name}" for part in ("train", "test") for name in ("loss", "accuracy")}
    assert outcomes < set(record.summary)
    assert record.action == "trained"


def test_a_run_of_a_toy_logs_its_coordinates(tmp_path) -> None:
    task = CAGradToy(start=(1.0, -2.0))
    schedule = replace(SHORT, eval_every=10)
    run = replace(a_run(task=task, schedule=schedule), make_model=make_point)
    record = execute(run, tmp_path, [])
    rows = [row for row in lines(record, "metrics.jsonl") if "test/x1" in row]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert {"test/x2", "test/loss_1", "test/loss_2"} < set(rows[0])
    assert rows[-1]["test/x2"] == record.summary["test/x2"] != -2.0


def make_point(data: Data) -> nn.Module:
    return Point(data.input_shape, data.num_outputs, start=data.start or ())


def test_a_logger_gets_the_numbers_of_the_files(tmp_path) -> None:
    logger, run = Listening(), a_run(gs.Clip(0.01))
    record = execute(run, tmp_path, [logger])
    (info,) = logger.begun
    assert (info.study, info.arm, info.label) == ("study", "treated", "clip-seed0")
    assert (info.directory, info.total_steps) == (record.directory, 30)
    sent = [{"step": step, "train/loss": values["train/loss"]} for step, values in logger.logged]
    assert sent == lines(record, "metrics.jsonl")
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
    expected = {
        (row["step"], f"effect/{row['transform']}/{row['site']}/{name}"): row[name]
        for row in effects
        for name in ("seen", "calls", *EFFECT_NAMES, "norm_max")
    }
    assert expected == {
        (step, key): value
        for step, values in logged.items()
        for key, value in values.items()
        if key.startswith("effect/")
    }


@pytest.mark.parametrize(
    ("transform", "when"),
    [
        (gs.Clip(1e9), None),
        (gs.AddNoise(1.0), gs.Steps(start=10**6)),
        (gs.AddNoise(1.0), gs.Steps(start=29, every=2)),
    ],
    ids=["clip", "never fires", "at the last step"],
)
def test_the_arms_differ_by_the_transform_alone(tmp_path, transform, when) -> None:
    control = execute(a_run(), tmp_path, [])
    treated = execute(a_run(transform, when=when), tmp_path, [])
    outcome = ("train/loss", "test/loss", "test/accuracy")
    same = lines(treated, "metrics.jsonl") == lines(control, "metrics.jsonl")
    assert same  # dropout and batches are the same as the control's
    alike = [treated.summary[key] == control.summary[key] for key in outcome]
    assert all(alike) == (when != gs.Steps(start=29, every=2))


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


@pytest.mark.parametrize("task", [Wrapped(), Wrapped(7, "raise")], ids=repr)
def test_generators_and_threads_are_restored_after_a_run(tmp_path, task) -> None:
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


@pytest.mark.parametrize(("log_every", "most"), [(1, 1000), (7, 4), (30, 4)])
def test_the_first_loss_that_is_not_finite_is_recorded_for_any_log_interval(
    tmp_path, monkeypatch, log_every: int, most: int
) -> None:
    monkeypatch.setattr(logged_numbers, "MAX_PENDING_LOSSES", most)
    run = a_run(gs.Clip(0.1), task=Wrapped(12, "one nan"))
    schedule = replace(run.schedule, log_every=log_every)
    record = execute(replace(run, schedule=schedule), tmp_path, [])
    assert record.summary["state"] == "diverged"
    assert record.summary["diverged_step"] == 12


def test_a_run_that_diverges_in_its_last_step_is_diverged(tmp_path) -> None:
    record = execute(a_run(gs.Scale(1e38), when=gs.Steps(start=29)), tmp_path, [])
    assert all("not_finite" not in row for row in lines(record, "metrics.jsonl"))
    assert record.summary["state"] == "diverged"


class Rude(Listening):
    """Raises at a given call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        setattr(self, where, raising)


@pytest.mark.parametrize(("where", "guard"), [("start", True), ("log", False), ("finish", True)])
def test_a_logger_that_raises_does_not_end_training(tmp_path, where, guard) -> None:
    plain, other = execute(a_run(), tmp_path / "a", []), Listening()
    rude: Logger = GuardedLogger(Rude(where)) if guard else Rude(where)
    assert_same(execute(a_run(), tmp_path / "b", [rude, other]), plain)
    assert len(other.logged) == 6
    assert other.ended[0][0] == "finished"


@pytest.mark.parametrize("at", [12, 0], ids=["training", "writing of the summary"])
def test_a_logger_gets_the_state_of_a_failed_run(tmp_path, monkeypatch, at: int) -> None:
    if not at:
        monkeypatch.setattr(RunDirectory, "write_summary", raising)
    logger = Listening()
    with pytest.raises(Torn):
        execute(a_run(task=Wrapped(at, "raise")), tmp_path, [logger])
    assert [state for state, _ in logger.ended] == ["failed"]


def test_warnings_of_users_code_are_emitted_once(tmp_path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        execute(a_run(task=Wrapped(does="warn")), tmp_path, [])
    assert [str(item.message) for item in caught] == ["mine"]


def test_a_transform_that_changes_nothing_is_noted_with_a_bound_that_would(tmp_path) -> None:
    record = execute(a_run(gs.Clip(1e9)), tmp_path, [])
    (note,) = notes(record)
    assert record.summary["idle"] is True
    assert "idle" not in execute(a_run(gs.Identity()), tmp_path, []).summary
    assert note.startswith(f"clip {IDLE}. Quantiles of |g|: 50% ")
    words = note.partition("A bound of ")[2].split()
    entries, norms = float(words[0]), float(words[5])
    for transform in (gs.Clip(entries), gs.ClipNorm(norms)):
        record = execute(a_run(transform), tmp_path, [])
        changed = [row["changed"] for row in lines(record, "effects.jsonl")]
        assert any(changed), transform
        assert notes(record) == []
        assert "idle" not in record.summary


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
def test_a_suggested_bound_is_below_the_largest_value_also_as_printed(
    quantiles: list[float], norms: list[float]
) -> None:
    words = suggested_bounds(quantiles, norms).split()
    assert 0 < float(words[3]) < quantiles[-1]
    assert 0 < float(words[8]) < max(norms)


@pytest.mark.parametrize(
    ("transform", "when", "starts", "end"),
    [
        (
            gs.Chain(gs.Zero(), gs.Clip(0.01)),
            None,
            [f"clip {IDLE}."],
            "norms from 0 to 0. The gradients were zero.",
        ),
        (
            gs.Chain(gs.Clip(1e9), gs.Scale(0.5), gs.Clip(1e8)),
            None,
            [f"clip {IDLE}.", f"clip_2 {IDLE}."],
            "would change some.",
        ),
        (gs.Clip(0.01), gs.Steps(start=10**6), ["clip: its trigger never fired in 120"], ""),
    ],
    ids=["zeros", "chain", "trigger"],
)
def test_each_transform_that_changes_nothing_is_noted(
    tmp_path, transform, when, starts: list[str], end: str
) -> None:
    record = execute(a_run(transform, when=when), tmp_path, [])
    texts = notes(record)
    for text, start in zip(texts, starts, strict=True):
        assert text.startswith(start)
        assert text.endswith(end)
    assert "idle" not in record.summary  # another link acts, or nothing was measured


def test_a_task_that_changes_the_current_folder_moves_no_file(tmp_path, monkeypatch) -> None:
    class Changing(Wrapped):
        def load(self):
            os.chdir(other)
            return super().load()

    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    monkeypatch.chdir(here)
    record = execute(a_run(gs.Clip(0.1), task=Changing()), Path("runs"), [])
    assert list(other.iterdir()) == []
    assert record.directory.parents[1] == here / "runs"
    names = {path.name for path in record.directory.iterdir()}
    assert names >= {"summary.json", "checkpoint.pt", "metrics.jsonl", "config.yaml"}
