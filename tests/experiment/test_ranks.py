"""`ranks=n`: a run in n processes equals the run in one, ends as a whole, and resumes."""

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from gradsurg.experiment.ranks import Ranks, in_ranks, refuse_batch_norm
from torch import Tensor, distributed, nn

import gradsurg as gs
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run import ComputeOptions, Run
from gradsurg.models.mlp import MLP
from gradsurg.sites.base import Selector
from gradsurg.tasks.base import Data
from gradsurg.transforms.base import Transform
from tests.builds import built
from tests.runs import Wrapped, a_run

THREADS = 1


def without_dropout(data: Data) -> nn.Module:
    return MLP(data.input_shape, data.num_outputs, hidden=(16,))


def run_in(ranks: int, transform: Transform | None = None, at: Selector | None = None) -> Run:
    run = a_run(transform, at)
    schedule = replace(run.schedule, check_ranks=5)
    compute = ComputeOptions(ranks=ranks)
    identity = {**run.identity, "ranks": ranks}
    return replace(run, schedule=schedule, compute=compute, identity=identity)


def weights(record: Record) -> dict[str, Tensor]:
    checkpoint = torch.load(record.directory / "checkpoint.pt", weights_only=False)
    return checkpoint["state"]["model"]


def logged(record: Record) -> list[dict[str, float]]:
    text = (record.directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "at", [gs.Parameters(stage="step"), gs.Parameters(stage="backward_end")], ids=repr
)
def test_two_processes_train_as_one_does_with_the_same_batches(tmp_path: Path, at) -> None:
    one, two = (
        execute(
            replace(run_in(ranks, gs.Clip(0.01), at), make_model=without_dropout),
            tmp_path,
            [],
            THREADS,
        )
        for ranks in (1, 2)
    )
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(two)[name], weight)
    for row, other in zip(logged(one), logged(two), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    keys = ("test/accuracy", "steps", "state")
    assert [one.summary[key] for key in keys] == [two.summary[key] for key in keys]
    assert not distributed.is_initialized()


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_two_processes_aggregate_as_one_does(tmp_path: Path) -> None:
    words = ("task=overlay", "model=multi_head", "aggregator=pcgrad", "steps=10", "log_every=5")
    one, two = (
        execute(run, tmp_path, [], THREADS)
        for ranks in (1, 2)
        for run in built(*words, "eval_every=10", f"ranks={ranks}").runs
        if run.arm == "treated"
    )
    for row, other in zip(logged(one), logged(two), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    assert two.summary["test/loss"] == pytest.approx(one.summary["test/loss"], rel=1e-4)


def test_a_local_clip_is_told_to_act_on_each_process_s_gradient(tmp_path: Path) -> None:
    record = execute(run_in(2, gs.Clip(0.01)), tmp_path, [], THREADS)
    (note,) = record.summary["notes"]  # pyright: ignore[reportGeneralTypeIssues]
    assert "on the gradients of each of 2 processes" in note
    assert "stage='backward_end'" in note


def test_an_interrupted_run_ends_as_a_whole_one_with_the_state_of_each_process(
    tmp_path: Path,
) -> None:
    def run(task: Wrapped) -> Run:
        return replace(run_in(2, gs.GrokfastEMA()), task=task)  # its state differs by process

    whole = execute(run(Wrapped()), tmp_path / "whole", [], THREADS)
    with pytest.raises(KeyboardInterrupt):
        # the trial of `wrapped` is the first call
        execute(run(Wrapped(at=25, does="interrupt")), tmp_path / "torn", [], THREADS)
    torn = execute(run(Wrapped()), tmp_path / "torn", [], THREADS)
    assert torn.action == "resumed"
    assert all(torch.equal(weights(torn)[name], weight) for name, weight in weights(whole).items())


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    me = os.getpid()
    return set(Path(f"/proc/{me}/task/{me}/children").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("count", "notes"), [(2, 0), (3, 1)])
def test_a_resumed_run_tells_from_three_processes_on_that_bits_may_differ(
    tmp_path: Path, count: int, notes: int
) -> None:
    def run(task: Wrapped) -> Run:
        run = run_in(count)
        return replace(run, task=task, schedule=replace(run.schedule, batch_size=30))

    with pytest.raises(KeyboardInterrupt):
        execute(run(Wrapped(at=25, does="interrupt")), tmp_path, [], THREADS)
    record = execute(run(Wrapped()), tmp_path, [], THREADS)
    assert record.action == "resumed"
    texts = [str(note) for note in record.summary["notes"]]  # pyright: ignore[reportGeneralTypeIssues]
    assert sum("sum gradients in another order" in text for text in texts) == notes


@dataclass(frozen=True)
class FailsInSecond(Wrapped):
    """Digits whose loss at call `at` fails in the second process only."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if distributed.is_initialized() and distributed.get_rank() == 1:
            return super().loss(outputs, targets)
        return replace(self, at=0).loss_of_first(outputs, targets)

    def loss_of_first(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return Wrapped().loss(outputs, targets)


@pytest.mark.parametrize(
    ("does", "message"),
    [("kill", r"rank 1 of 2 was killed \(SIGKILL\)"), ("raise", "rank 1 of 2: Torn")],
)
def test_a_process_that_ends_is_named_and_ends_the_run(
    tmp_path: Path, does: str, message: str
) -> None:
    before = children()
    run = replace(run_in(2), task=FailsInSecond(at=12, does=does))
    with pytest.raises(RuntimeError, match=message):
        execute(run, tmp_path, [], THREADS)
    assert not distributed.is_initialized()
    assert children() <= before
    (log,) = tmp_path.rglob("error.log")
    assert "rank 1 of 2" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
def test_the_others_end_with_rank_0_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def work(ranks: Ranks, folder: Path) -> None:
        (tmp_path / f"pid{ranks.rank}").write_text(f"{os.getpid()}", encoding="utf-8")
        ranks.from_first(0)
        if ranks.rank:
            sleep(60)  # without communication
        os.kill(os.getpid(), number)

    first = os.fork()
    if not first:
        with (tmp_path / "printed").open("w", encoding="utf-8") as sys.stderr:
            in_ranks(3, work)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(first, 0)[1]) == number
    pids = [int((tmp_path / f"pid{rank}").read_text(encoding="utf-8")) for rank in (1, 2)]
    deadline = monotonic() + 30
    while any(map(is_running, pids)) and monotonic() < deadline:
        sleep(0.05)
    assert not any(map(is_running, pids))
    printed = (tmp_path / "printed").read_text(encoding="utf-8")
    assert printed == "rank 0 of 3 was killed, and the others have ended with it\n"
    assert not [*temporary.iterdir()]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


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
    with pytest.raises(ValueError, match="must be a multiple of ranks=4, found 6"):
        Batches(inputs, inputs, size=6, seed=3, ranks=4)


def test_an_unused_parameter_is_searched_for(tmp_path: Path) -> None:
    def with_unused(data: Data) -> nn.Module:
        model = without_dropout(data)
        model.unused = nn.Parameter(torch.zeros(1))
        return model

    run = replace(run_in(2), make_model=with_unused)
    assert execute(run, tmp_path, [], THREADS).summary["state"] == "finished"


def test_batch_norm_is_refused() -> None:
    assert "'0' (BatchNorm1d)" in refuse_batch_norm(nn.Sequential(nn.BatchNorm1d(2)))
    assert refuse_batch_norm(nn.Sequential(nn.LayerNorm(2))) == ""


def test_an_interrupt_of_the_terminal_ends_rank_0_only() -> None:
    def work(ranks: Ranks, folder: Path) -> str:
        if ranks.rank:
            os.kill(os.getpid(), signal.SIGINT)  # ignored
        return str(ranks.from_first(ranks.rank))

    assert in_ranks(2, work) == "0"


def test_each_process_has_one_thread_since_a_fork_cannot_use_more() -> None:
    def work(ranks: Ranks, folder: Path) -> list[int]:
        return ranks.gathered(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert in_ranks(2, work) == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
