"""Small runs on real digits, also interrupted ones, and helpers that read and compare them."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run import Run, Schedule
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.loggers.base import Logger, RunEnd, RunInfo
from gradsurg.models.mlp import MLP
from gradsurg.report.load import read_runs
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import Chance, Data, Task
from gradsurg.tasks.digits import Digits
from gradsurg.transforms.base import Transform
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger
from tests.nets import CLASSES, FEATURES

ROOT = Path(__file__).parent.parent


SHORT = Schedule(steps=30, batch_size=32, log_every=5, checkpoint_every=10, effects_every=4)


TIMES = ("seconds",)  # of a checkpoint


class Torn(Exception):
    """The exception that interrupts a run in the tests."""


@dataclass(frozen=True)
class Wrapped(Task):
    """Digits whose loss at call `at` (from 1) raises, is an interruption or is NaN."""

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
        if self.does == "nan" and len(self.calls) >= self.at:
            return loss * float("nan")
        if self.does == "one nan" and len(self.calls) == self.at:
            return loss + float("nan")  # whose gradient is the loss's
        if self.does == "warn":
            warnings.warn("mine", UserWarning, stacklevel=1)
        return loss

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return Digits().metrics(outputs, targets)

    def chance(self, targets: Tensor) -> Chance | None:
        return Digits().chance(targets)


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
    """Return the run of one arm; the control arm without a transform."""
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
    return (record.directory / name).read_text(encoding="utf-8")


def lines(record: Record, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in read(record, name).splitlines()]


def untimed(numbers: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in numbers.items() if not key.startswith("time/")}


def assert_same(found: Record, expected: Record) -> None:
    """Assert that two runs are bit-identical apart from times."""
    assert found.directory != expected.directory
    assert bits(found.directory) == bits(expected.directory)
    assert untimed(found.summary) == untimed(expected.summary)


def assert_same_studies(found: Path, expected: Path) -> None:
    """Assert that the runs of two folders are bit-identical apart from times and notes."""
    runs, others = (sorted(folder.rglob("summary.json")) for folder in (found, expected))
    assert len(runs) == len(others) > 0
    for one, other in zip(runs, others, strict=True):
        assert one.parent.name.rpartition("-")[0] == other.parent.name.rpartition("-")[0]
        assert bits(one.parent) == bits(other.parent)


def bits(run: Path) -> dict[str, object]:
    """Return what a run has logged and kept in a form that `==` compares."""
    directory = RunDirectory(run)
    names = ("metrics.jsonl", "effects.jsonl", "conflicts.jsonl")
    rows = {name: [untimed(row) for row in directory.read_rows(name)] for name in names}
    summary = untimed(directory.read_summary())
    numbers = {key: summary[key] for key in summary if not key.startswith(("hardware", "note"))}
    return {**rows, "summary": numbers, "checkpoint": flat(directory.load_checkpoint())}


def assert_resumes(make: Callable[[int], Run], out: Path, at: int) -> Record:
    """Assert that a run whose loss raises at call `at` ends, once resumed, like the whole one.

    `make` is given the number of the call, 0 for a loss that does not raise. Return the whole run.
    """
    whole = execute(make(0), out / "whole", [])
    with pytest.raises(Torn):
        execute(make(at), out / "torn", [])
    assert_same(execute(make(0), out / "torn", []), whole)
    return whole


def flat(thing: object) -> object:
    """Return a checkpoint in a form that `==` compares bit by bit."""
    match thing:
        case Tensor():
            raw = thing.detach().cpu().reshape(-1).view(torch.uint8)
            return str(thing.dtype), tuple(thing.shape), raw.numpy().tobytes()
        case dict():
            return {key: flat(value) for key, value in thing.items() if key not in TIMES}
        case list() | tuple():
            return [flat(value) for value in thing]
        case _:
            return thing


class Listening(Logger):
    """A logger that records its calls."""

    def __init__(self) -> None:
        self.begun: list[RunInfo] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[tuple[str, dict[str, float]]] = []

    def start(self, run: RunInfo) -> None:
        self.begun.append(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        self.ended.append((state, dict(summary)))

    def abandon(self) -> None: ...

    def notes(self) -> list[str]:
        return []


MIXED = gs.Chain(gs.GrokfastEMA(), gs.AddNoise(0.001), gs.Clip(0.05))


def notes(record: Record) -> list[str]:
    """Return the notes of a run with their details."""
    (run,) = read_runs(record.directory.parent, [record.directory.name])
    return [*run.notes.values()]


def data(size: int = 4, accumulate: int = 1, count: int = 26) -> Batches:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    return Batches(inputs, targets, size, 3, accumulate)


def kept_in(folder: Path) -> dict[str, Any]:  # Any: what a checkpoint holds
    """Return the checkpoint of a run's directory."""
    kept = RunDirectory(folder).load_checkpoint()
    assert kept is not None
    return cast(dict[str, Any], kept)


def ended(record: Record) -> dict[str, Any]:  # Any: what JSON can hold
    """Return the summary of a run."""
    assert record.summary is not None
    return record.summary


def effect(step, calls, sampled, **numbers):
    found = {"step": step, "transform": "clip", "site": "w", "seen": 2 * calls, "calls": calls}
    return {**found, "sampled": sampled, "nonfinite": 0, **numbers}


def raising(*args: object) -> None:
    raise Torn
