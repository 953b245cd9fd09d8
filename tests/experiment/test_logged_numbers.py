"""Test metrics during training, and entries of the summary."""

import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.execution import execute
from gradsurg.experiment.logged_numbers import hardware
from gradsurg.experiment.run import Run
from tests.builds import built
from tests.runs import (
    SHORT,
    Listening,
    a_run,
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


def evaluated(every: int, *surgery: Any) -> Run:  # Any: transform, place and trigger of a run
    run = a_run(*surgery, schedule=replace(SHORT, eval_every=every))
    return replace(run, make_model=lambda data: Noticing())


HALF = gs.Scale(0.5)
WAYS = {
    "parameters": (HALF, gs.Parameters()),
    "outputs": (HALF, gs.Outputs(types="ReLU")),
    "values": (HALF, gs.Activations(types="ReLU")),
    "every module": (HALF, gs.EveryModule(types="ReLU")),
    "nodes": (HALF, gs.Nodes("Relu")),
    "saved": (HALF, gs.SavedTensors(types="ReLU")),
    "everything saved": (HALF, gs.SavedTensors("block")),
    "group": (gs.ClipGlobalNorm(0.5), gs.Parameters(stage="backward_end")),
    "a trigger that looks": (
        HALF,
        gs.Parameters(),
        gs.Threshold(0.5, "max_abs", source="output:act"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_tests_during_training_do_not_change_the_run(tmp_path: Path, way: str) -> None:
    tested, plain = (
        execute(evaluated(every, *WAYS[way]), tmp_path / str(every), []) for every in (5, 0)
    )
    rows = lines(tested, "metrics.jsonl")
    assert all({"test/loss", "test/accuracy"} < set(row) for row in rows)
    trained = [{key: row[key] for key in ("step", "train/loss")} for row in rows]
    assert trained == lines(plain, "metrics.jsonl")
    assert lines(tested, "effects.jsonl") == lines(plain, "effects.jsonl") != []
    assert flat(kept_in(tested.directory)) == flat(kept_in(plain.directory))
    outcome = [key for key in ended(plain) if key.startswith(("train/", "test/", "notes"))]
    assert [ended(tested)[key] for key in outcome] == [ended(plain)[key] for key in outcome]


def test_test_metrics_are_logged_when_due_and_at_the_last_step(tmp_path: Path) -> None:
    logger = Listening()
    record = execute(evaluated(20), tmp_path, [logger])
    rows = lines(record, "metrics.jsonl")
    assert [row["step"] for row in rows if "test/loss" in row] == [20, 30]
    assert [step for step, values in logger.logged if "test/accuracy" in values] == [20, 30]
    tested = {key: value for key, value in ended(record).items() if key.startswith("test/")}
    assert tested == {key: value for key, value in rows[-1].items() if key.startswith("test/")}


def test_a_summary_has_the_hardware_the_time_and_the_number_of_examples(
    tmp_path: Path,
) -> None:
    record = execute(evaluated(0), tmp_path, [])
    summary = ended(record)
    assert 0 < kept_in(record.directory)["seconds"] <= summary["time/train_s"]
    assert summary["hardware"] == hardware(torch.device("cpu"))
    assert (summary["skipped_steps"], summary["test_examples"]) == (0, 450)
    assert "validation_examples" not in summary
    (pair,) = built("validation=0.2", "steps=2", "seeds=1", "control=none", "transform=none").pairs
    summary = ended(execute(pair.runs[0], tmp_path, []))
    assert (summary["validation_examples"], summary["test_examples"]) == (270, 450)
    run = built("task=quadratics_toy", "model=point", "steps=2").pairs[0].runs[0]
    assert "test_examples" not in ended(execute(run, tmp_path, []))  # the task moves a point


def test_the_hardware_names_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = hardware(torch.device("cpu"))
    version = re.escape(torch.__version__)
    assert re.fullmatch(rf"{platform.machine()}, .+, \d+ threads?, torch {version}", text)
    assert platform.node() not in text
    info = tmp_path / "cpuinfo"
    lines = "processor : 0\nmodel name\t: A Fine CPU\nmodel name\t: another\n"
    info.write_text(lines, encoding="utf-8")
    monkeypatch.setattr("gradsurg.experiment.logged_numbers.CPU_INFO", info)
    assert ", A Fine CPU, " in hardware(torch.device("cpu"))
    info.unlink()
    assert ", , " not in hardware(torch.device("cpu"))
