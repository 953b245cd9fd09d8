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
from gradsurg.hooks.intervention import Intervention
from gradsurg.models.multi_head import MultiHead
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, MultiTask
from gradsurg.tasks.digit_attributes import DigitAttributes
from gradsurg.training.run import Run
from gradsurg.training.run_directory import RunDirectory
from gradsurg.training.study import Record, execute
from tests.loggers.offline import alone
from tests.runs import MIXED, ROOT, SHORT, a_run, assert_same

# Each child is killed at its own moment: in a step, or before a call of the system.
KILLS = """
import os, random, signal, sys
from pathlib import Path
import torch
from gradsurg.training.study import execute
from tests.runs import MIXED, Wrapped, a_run

torch.set_num_threads(1)


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def at(number, function):
    calls = [0]

    def called(*args, **kwargs):
        calls[0] += 1
        return (die if calls[0] == number else function)(*args, **kwargs)

    return called


draws = random.Random(int(sys.argv[1]))
moments = [("step", draws.randint(1, 30)) for _ in range(4)]
moments += [("replace", draws.randint(1, 6)) for _ in range(2)]
moments += [("fsync", draws.randint(1, 10)) for _ in range(2)]
for number, (kind, count) in enumerate(moments):
    child = os.fork()
    if not child:
        task = None
        match kind:
            case "step":
                task = Wrapped(count, "kill")
            case _:
                setattr(os, kind, at(count, getattr(os, kind)))
        execute(a_run(MIXED, task=task), Path(str(number)), [], threads=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    how = "killed" if os.WIFSIGNALED(status) else "ended"
    print(number, kind, count, how, os.WTERMSIG(status))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Record:
    return execute(a_run(MIXED), tmp_path_factory.mktemp("whole"), [], threads=1)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4)),
    ],
)
def test_a_run_killed_at_a_random_moment_ends_like_an_uninterrupted_one(
    tmp_path: Path, whole: Record, seed: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(seed)],
        cwd=tmp_path,
        env=alone(tmp_path) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    moments = [line.split() for line in done.stdout.splitlines()]
    assert len(moments) == 8
    assert [how for *_, how, signal in moments if signal == "9"] == ["killed"] * 8, done.stdout
    for number, *moment, _, _ in moments:
        out = tmp_path / number
        place = RunDirectory(a_run(MIXED).directory(out))
        for name in ("metrics.jsonl", "effects.jsonl"):
            place.read_rows(name)  # whole lines can be read at any time
        assert place.state in ("planned", "interrupted", "finished"), moment
        again = execute(a_run(MIXED), out, [], threads=1)
        if again.action != "skipped":
            assert_same(again, whole)
        left = {path.name for path in place.path.iterdir() if path.name.endswith(".tmp")}
        assert not left, moment


PARITY_AND_DIGIT = DigitAttributes(attributes=("parity", "digit"))


@dataclass(frozen=True)
class Killed(MultiTask):
    """Two questions about digits; at call `at` (from 1) of its losses the process is killed."""

    at: int = 0
    calls: list[int] = field(default_factory=list)
    of: DigitAttributes = PARITY_AND_DIGIT

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
from gradsurg.training.study import execute
from tests.training.test_kills import several

execute(several(sys.argv[1], int(sys.argv[2])), Path("."), [], threads=1)
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in "famo pcgrad" else pytest.mark.full)
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
