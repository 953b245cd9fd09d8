"""A run in several processes equals the run in one, ends as a whole, and resumes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import gradsurg as gs
from gradsurg.experiment import processes
from gradsurg.experiment.build import build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.execution import Record, _built, execute, follow
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run import Run
from gradsurg.models.mlp import MLP
from gradsurg.tasks.digits import Digits
from tests.builds import config
from tests.forks import Ranks, forked, in_ranks
from tests.loggers.offline import alone
from tests.runs import ROOT, Listening, assert_same_studies

SHORT = ("steps=30", "log_every=10", "checkpoint_every=10", "control=none", "checkpoint_seconds=0")
SHORT += ("check_ranks=5",)
HERE = "tests.experiment.test_processes"


class WithUnused(MLP):
    """A model with a parameter that has no gradient."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, hidden=(16,))
        self.unused = nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class Fails(Digits):
    """Digits whose loss fails in the processes up to `last` and from `first` on."""

    first: int = 1
    last: int = 1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if distributed.is_initialized() and self.first <= distributed.get_rank() <= self.last:
            raise ValueError("mine")
        return super().loss(outputs, targets)


class Interrupts(Listening):
    """Ctrl-C at the log of step 20."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 20:
            raise KeyboardInterrupt


@pytest.fixture
def in_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command in several processes; the others are forks, and must not fail."""
    before = signal.getsignal(signal.SIGTERM)

    def call(count: int, command: Callable[[], None]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("WORLD_SIZE", str(count))
        others = []
        for rank in reversed(range(count)):
            monkeypatch.setenv("RANK", str(rank))
            if rank:
                follower = lambda: processes.run_in_all(command, follow)  # noqa: E731
                others.append(forked(follower, tmp_path / f"{rank}"))
        try:
            processes.run_in_all(command, follow)
        finally:
            codes = {os.waitpid(pid, 0)[1] for pid in others}
            assert not distributed.is_initialized()
        assert codes == {0}

    yield call
    signal.signal(signal.SIGTERM, before)


def run_of(*words: str, **groups: object) -> Run:
    return build({**config(*SHORT, *words), **groups}).runs[0]


def weights(record: Record) -> dict[str, Tensor]:
    checkpoint = torch.load(record.directory / "checkpoint.pt", weights_only=False)
    return checkpoint["state"]["model"]


def logged(record: Record) -> list[dict[str, float]]:
    text = (record.directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
@pytest.mark.parametrize(
    ("words", "groups", "note"),
    [
        (["transform=clip", "site.stage=step"], {}, ""),
        (["transform=clip", "site.stage=backward_end"], {}, ""),
        (["transform=scale"], {"model": {"_target_": f"{HERE}.WithUnused"}}, ""),
        (["task=overlay", "model=multi_head", "aggregator=pcgrad"], {}, ""),
        (["transform=clip"], {}, "on the gradient of each of 2 processes"),
    ],
    ids=["step", "backward_end", "unused parameter", "several losses", "backward"],
)
def test_two_processes_train_as_one_does_with_the_same_batches(
    tmp_path: Path, in_team, words: list[str], groups: dict[str, object], note: str
) -> None:
    records = []

    def command() -> None:
        records.append(execute(run_of("eval_every=30", *words, **groups), tmp_path, []))

    command()
    in_team(2, command)
    one, two = records
    assert one.directory.name != two.directory.name
    if note:
        assert note in str(two.summary["notes"])
        return
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(two)[name], weight)
    for row, other in zip(logged(one), logged(two), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    assert two.summary["test/loss"] == pytest.approx(one.summary["test/loss"], rel=1e-4)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_as_a_whole_one_with_the_state_of_each_process(
    tmp_path: Path, in_team, count: int
) -> None:
    records: dict[str, Record] = {}

    def trained(name: str, *loggers: Listening) -> None:
        # The state of this transform differs by process.
        run = run_of("transform=grokfast_ema", "batch_size=30", "model.dropout=0.3")
        records[name] = execute(run, tmp_path / name, loggers)

    in_team(count, lambda: trained("whole"))
    with pytest.raises(KeyboardInterrupt):
        in_team(count, lambda: trained("torn", Interrupts()))
    in_team(count, lambda: trained("torn"))
    torn = records["torn"]
    assert torn.action == "resumed"
    for name, weight in weights(records["whole"]).items():
        assert torch.equal(weights(torn)[name], weight)


@pytest.mark.parametrize(
    ("first", "last", "message", "words"),
    [
        (1, 1, "rank 1 of 2: ValueError: mine", []),
        *(
            pytest.param(1, 1, "rank 1 of 2: ValueError: mine", words, marks=pytest.mark.slow)
            for words in (
                ["site=buckets", "site.stage=reduced"],
                ["site.stage=backward_end", "when=threshold"],
            )
        ),
        (0, 1, "mine", []),
    ],
)
def test_an_error_of_one_process_ends_the_run_in_all_and_the_next_run_is_trained(
    tmp_path: Path, in_team, first: int, last: int, message: str, words: list[str]
) -> None:
    task = {"_target_": f"{HERE}.Fails", "first": first, "last": last}
    states = []

    def command() -> None:
        with pytest.raises((RuntimeError, ValueError), match=f"^{message}"):
            execute(run_of("transform=clip", *words, task=task), tmp_path, [])
        states.append(execute(run_of("transform=clip"), tmp_path, []).summary["state"])

    in_team(2, command)
    assert states == ["finished"]
    (log,) = tmp_path.rglob("error.log")
    assert 'raise ValueError("mine")' in log.read_text(encoding="utf-8")


def test_a_rank_without_the_run_of_rank_0_says_so() -> None:
    config = run_of("transform=clip").config
    with pytest.raises(RuntimeError, match="^there is no run other-seed0 here: the code or data"):
        _built(config, 0, "other-seed0")


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ["batch_size=33"],
            ["batch_size: must be a multiple of 2, the processes that share each "],
        ),
        (["compile=true", "threads=2"], ["compile: needs one process, found 2 processes"]),
        (
            [
                "task=overlay",
                "model=multi_head",
                "aggregator=mgda",
                "shared.engine=feature",
                "shared.features=relu",
            ],
            ["shared.engine: feature has no mean over processes: needs one process or shared.redu"],
        ),
        (["transform=dp_sgd"], ["transform: "]),
        (["model=resnet"], ["model: 'norm' (BatchNorm2d) normalizes each process's "]),
    ],
)
def test_what_depends_on_the_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: list[str], faults: list[str]
) -> None:
    monkeypatch.setattr(processes, "launched", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        build(config("transform=clip", *words))
    assert [
        line[: len(fault)] for line, fault in zip(caught.value.faults, faults, strict=True)
    ] == faults


def test_weights_that_differ_in_one_bit_are_named() -> None:
    def work(ranks: Ranks, folder: Path) -> str:
        model = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
            gs.check_ranks(model)
            model.weight[1, 2] = 1.0 + ranks.rank * 2**-23
        try:
            gs.check_ranks(model)
        except RuntimeError as error:
            return str(error)
        return ""

    assert "different weights: weight." in in_ranks(2, work)
    gs.check_ranks(nn.Linear(1, 1))  # without a process group


def test_each_process_has_its_part_of_each_batch() -> None:
    inputs = torch.arange(12)
    whole = Batches(inputs, inputs, size=6, seed=3).start(1)
    parts = [Batches(inputs, inputs, 6, 3, rank=rank, ranks=2).start(1) for rank in (0, 1)]
    for _ in range(3):
        assert torch.equal(torch.cat([next(part)[0] for part in parts]), next(whole)[0])


DIES = '''
import os
from pathlib import Path
from torch import distributed

def dies(grad):
    """Kills the process of the rank in the file `killed` at call 200, and removes the file."""
    global calls
    told, rank = Path("killed"), distributed.is_initialized() and distributed.get_rank()
    calls += distributed.is_initialized()
    if calls == 200 and told.is_file() and told.read_text() == str(rank):
        told.unlink()
        os.kill(os.getpid(), 9)
    return grad / 2

calls = 0
'''
SWEEP = ("-m", "transform=mine.dies,sign", "site.stage=step", "seeds=1", "steps=60", "log_every=5")
SWEEP += ("checkpoint_every=10", "checkpoint_seconds=0", "logger=none", "report=false")


def agents(folder: Path, *options: tuple[str, ...]) -> tuple[int, str]:
    """Start a torchrun with each of the options together; return the largest code, and stderr."""
    (folder / "mine.py").write_text(DIES, encoding="utf-8")
    environment = alone(folder) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    launch = [sys.executable, "-m", "torch.distributed.run"]
    started = [
        subprocess.Popen(
            [*launch, *each, "-m", "gradsurg.run", *SWEEP],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in options
    ]
    ended = [each.communicate(timeout=240) for each in started]
    return max(each.returncode for each in started), "".join(err for _, err in ended)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep on two agents, each with one process, that meet at one rendezvous."""
    folder = tmp_path_factory.mktemp("whole")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        end = f"--rdzv_endpoint=127.0.0.1:{free.getsockname()[1]}"
    agent = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=1", end)
    code, err = agents(folder, agent, agent)
    assert code == 0, err
    assert len(re.findall("^job [12]: ", err, re.MULTILINE)) == 2  # printed by rank 0 alone
    return folder / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_command_whose_process_is_killed_resumes_to_the_bits_of_another_on_two_machines(
    tmp_path: Path, whole: Path, number: int
) -> None:
    (tmp_path / "killed").write_text(str(number), encoding="utf-8")
    code, err = agents(tmp_path, ("--standalone", "--nproc_per_node=2"))
    assert code == 1
    assert err.count("the same command resumes from the last checkpoint") == 1
    assert "Signal 9 (SIGKILL)" in err
    code, err = agents(tmp_path, ("--standalone", "--nproc_per_node=2"))
    assert code == 0, err
    assert "was interrupted, resumed from its checkpoint" in err
    assert_same_studies(tmp_path / "runs", whole)
