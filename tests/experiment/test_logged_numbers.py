"""Test metrics during training, and entries of the summary."""

import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.execution import execute
from gradsurg.experiment.logged_numbers import hardware
from gradsurg.experiment.run import Run
from gradsurg.experiment.settings import Settings
from gradsurg.sites.base import Selector
from gradsurg.tasks.digits import Digits
from gradsurg.transforms.base import Transform
from tests.builds import built
from tests.runs import (
    SHORT,
    Listening,
    Torn,
    Wrapped,
    a_run,
    assert_resumes,
    ended,
    flat,
    kept_in,
    lines,
)


class Noticing(nn.Module):
    """Batch norm's statistics, dropout, a count of its calls, a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.inner = nn.Flatten(), nn.Linear(64, 16)
        self.norm, self.act, self.drop = nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        self.output = nn.Linear(16, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.act(self.norm(self.inner(self.flatten(inputs)))))
        noise = torch.rand(hidden.shape, generator=self.generator) + torch.rand(hidden.shape)
        return self.output(hidden + 0.01 * noise)


def evaluated(
    every: int,
    transform: Transform | None = None,
    at: Selector | None = None,
    when: gs.triggers.base.Trigger | None = None,
    fails_at: int = 0,
) -> Run:
    task = Wrapped(fails_at, "raise") if fails_at else Digits()
    run = a_run(transform, at, when, task=task, schedule=replace(SHORT, eval_every=every))
    return replace(run, make_model=lambda data: Noticing())


WAYS = {
    "parameters": (gs.Parameters(), None),
    "outputs": (gs.Outputs(types="ReLU"), None),
    "values": (gs.Activations(types="ReLU"), None),
    "every module": (gs.EveryModule(types="ReLU"), None),
    "nodes": (gs.Nodes("Relu"), None),
    "saved": (gs.SavedTensors(types="ReLU"), None),
    "everything saved": (gs.SavedTensors("block"), None),
    "group": (gs.Parameters(stage="backward_end"), None),
    "a trigger that looks": (gs.Parameters(), gs.Threshold(0.5, "max_abs", source="output:act")),
}


@pytest.mark.parametrize("way", WAYS)
def test_tests_during_training_do_not_change_the_run(tmp_path: Path, way: str) -> None:
    at, when = WAYS[way]
    transform = gs.ClipGlobalNorm(0.5) if way == "group" else gs.Scale(0.5)
    tested, plain = (
        execute(evaluated(every, transform, at, when), tmp_path / str(every), [])
        for every in (5, 0)
    )
    rows = lines(tested, "metrics.jsonl")
    assert all({"test/loss", "test/accuracy"} < set(row) for row in rows)
    trained = [{key: row[key] for key in ("step", "train/loss")} for row in rows]
    assert trained == lines(plain, "metrics.jsonl")
    assert lines(tested, "effects.jsonl") == lines(plain, "effects.jsonl") != []
    checkpoint, other = (kept_in(record.directory) for record in (tested, plain))
    for state in (checkpoint, other):
        state.pop("seconds")
    assert flat(checkpoint) == flat(other)
    outcome = [key for key in ended(plain) if key.startswith(("train/", "test/", "notes"))]
    assert [ended(tested)[key] for key in outcome] == [ended(plain)[key] for key in outcome]


def test_the_last_row_has_the_test_metrics_of_the_summary(tmp_path: Path) -> None:
    logger = Listening()
    record = execute(evaluated(10), tmp_path, [logger])
    rows = lines(record, "metrics.jsonl")
    assert [row["step"] for row in rows if "test/loss" in row] == [10, 20, 30]
    tested = {key: value for key, value in ended(record).items() if key.startswith("test/")}
    assert tested == {key: value for key, value in rows[-1].items() if key.startswith("test/")}
    steps = [step for step, values in logger.logged if "test/accuracy" in values]
    assert steps == [10, 20, 30]


def test_the_last_step_is_tested_though_it_is_not_due(tmp_path: Path) -> None:
    record = execute(evaluated(20), tmp_path, [])
    rows = lines(record, "metrics.jsonl")
    assert [row["step"] for row in rows if "test/loss" in row] == [20, 30]


def test_an_interrupted_run_with_tests_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    schedule = replace(SHORT, eval_every=5)
    assert_resumes(
        lambda at: a_run(gs.Clip(0.05), task=Wrapped(at, "raise"), schedule=schedule), tmp_path, 17
    )


def test_test_metrics_are_in_the_logged_rows() -> None:
    fields = {"steps": 9, "batch_size": 4, "seeds": 1, "checkpoint_every": 9, "effects_every": 1}
    fields |= {"study": "s", "out": ".", "control": "plain", "device": "cpu", "log_every": 50}
    assert Settings(**fields, eval_every=100).eval_every == 100
    message = "eval_every: must be a multiple of log_every=50, whose rows it is written to, found 7"
    with pytest.raises(ValueError, match=message):
        Settings(**fields, eval_every=7)


def test_a_summary_has_the_hardware_and_the_training_time(tmp_path: Path) -> None:
    run = evaluated(0, fails_at=17)
    with pytest.raises(Torn):
        execute(run, tmp_path, [])
    checkpoint = kept_in(run.directory(tmp_path))
    record = execute(evaluated(0), tmp_path, [])
    assert 0 < checkpoint["seconds"] < ended(record)["time/train_s"]
    assert ended(record)["hardware"] == hardware(torch.device("cpu"))
    assert ended(record)["skipped_steps"] == 0


def test_a_summary_has_the_number_of_test_examples_unless_the_task_moves_a_point(
    tmp_path: Path,
) -> None:
    assert ended(execute(evaluated(0), tmp_path, []))["test_examples"] == 450
    run = built("task=quadratics_toy", "model=point", "steps=2").pairs[0].runs[0]
    assert "test_examples" not in ended(execute(run, tmp_path, []))


def test_the_hardware_names_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = hardware(torch.device("cpu"))
    version = re.escape(torch.__version__)
    assert re.fullmatch(rf"{platform.machine()}, .+, \d+ threads?, torch {version}", text)
    assert platform.node() not in text
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\nmodel name\t: A Fine CPU\nmodel name\t: another\n", encoding="utf-8"
    )
    monkeypatch.setattr("gradsurg.experiment.logged_numbers.CPU_INFO", info)
    assert ", A Fine CPU, " in hardware(torch.device("cpu"))
    info.unlink()
    assert ", , " not in hardware(torch.device("cpu"))
