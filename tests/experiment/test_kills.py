"""A run that is killed at any moment ends as if that had never been."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.execution import execute
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.models.multi_head import MultiHead
from gradsurg.tasks.base import Data, MultiTask
from gradsurg.tasks.overlay import Overlay
from tests.loggers.offline import alone
from tests.runs import MIXED, ROOT, SHORT, a_run, assert_same


@pytest.mark.parametrize(
    ("kind", "count"), [("replace", 1), ("replace", 3), ("fsync", 2), ("fsync", 5)]
)
def test_a_run_that_ends_before_a_call_of_the_system_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    whole = execute(a_run(MIXED), tmp_path / "whole", [], threads=1)
    function, calls = getattr(os, kind), []

    def dies(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) >= count:
            raise SystemExit
        return function(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, kind, dies)
        execute(a_run(MIXED), tmp_path, [], threads=1)
    place = RunDirectory(a_run(MIXED).directory(tmp_path))
    assert place.state in ("planned", "interrupted")
    assert_same(execute(a_run(MIXED), tmp_path, [], threads=1), whole)
    assert not [path for path in place.path.iterdir() if path.name.endswith(".tmp")]


PAIRS = Overlay(num_train=1000, num_test=100)


@dataclass(frozen=True)
class Killed(MultiTask):
    """Two digits in an image; at call `at` (from 1) of its losses the process is killed."""

    at: int = 0
    calls: list[int] = field(default_factory=list)
    of: Overlay = PAIRS

    @property
    def names(self) -> tuple[str, ...]:
        return self.of.names

    def load(self) -> Data:
        return self.of.load()

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.calls.append(1)
        if len(self.calls) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.of.losses(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return self.of.metrics(outputs, targets)


def several(name: str, at: int = 0) -> Run:
    """A run of two tasks with an aggregator, or the control."""
    aggregator = AGGREGATORS[name]()
    surgery = Surgery(Intervention(aggregator, gs.SharedParameters(), names=(name,)))
    return replace(
        a_run(),
        arm="control" if name == "sum" else "treated",
        label=name,
        identity={"label": name},
        surgery=surgery,
        shadow=name == "sum",
        task=Killed(at),
        make_model=lambda data: MultiHead(
            data.input_shape, data.num_outputs, heads=data.heads or (), width=8, hidden=(8,)
        ),
    )


AGGREGATORS = {
    "grad_norm": gs.GradNorm,
    "famo": gs.FAMO,
    "pcgrad": gs.PCGrad,
    "random": gs.Random,
    "sum": gs.Sum,
}
KILLED = """
import sys
from pathlib import Path
from gradsurg.experiment.execution import execute
from tests.experiment.test_kills import several

execute(several(sys.argv[1], int(sys.argv[2])), Path("."), [], threads=1)
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "famo" else pytest.mark.full)
        for name in AGGREGATORS
    ],
)
def test_a_killed_multi_task_run_ends_with_the_same_conflicts_and_state(
    tmp_path: Path, name: str
) -> None:
    whole = execute(several(name), tmp_path / "whole", [], threads=1)
    rows = RunDirectory(whole.directory).read_rows("conflicts.jsonl")
    assert [row["step"] for row in rows] == list(range(0, SHORT.steps, SHORT.effects_every))
    environment = alone(tmp_path) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, name, "17"]
    killed = subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    place = several(name).directory(tmp_path)
    checkpoint = RunDirectory(place).load_checkpoint() or {}
    assert checkpoint["step"] == 10
    again = execute(several(name), tmp_path, [], threads=1)
    assert again.action == "resumed"
    assert_same(again, whole)
    content = [(one.directory / "conflicts.jsonl").read_bytes() for one in (again, whole)]
    assert content[0] == content[1]
