"""Aggregators in several processes: `reduce` of SharedParameters under DistributedDataParallel."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.multitask.processes import mean_losses
from tests.forks import ALONE, Ranks, in_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

Reduce = Literal["mean", "local"]
EXAMPLES = 12


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        shared = self.trunk(inputs)
        return [head(shared) for head in self.heads]


def trained(
    ranks: Ranks,
    item: gs.Intervention,
    seed: int = 0,
    batches: int = 1,
    conflict: list[float] | None = None,
    **options: bool,
) -> Tensor:
    """The weights after four steps, in which each process has its part of the examples."""
    net = Heads()
    model = net if ranks.count == 1 else DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(1)
    with gs.Surgery(item, seed=seed).attach(model, optimizer, conflict_every=1) as live:
        for _ in range(4):
            optimizer.zero_grad()
            for batch in range(batches):
                inputs, targets = torch.randn(2, EXAMPLES, 6, generator=generator)
                own = slice(ranks.rank, None, ranks.count)
                outputs = model(inputs[own])
                targets = targets[own] * torch.tensor([1.0, 3.0, -2.0, 0.5, 1.0, 1.0])
                losses = {
                    name: (out[:, 0] - targets[:, index]).square().mean() / batches
                    for index, (name, out) in enumerate(zip("abc", outputs, strict=True))
                }
                live.backward(losses, aggregate=batch == batches - 1)
            optimizer.step()
        if conflict is not None:
            conflict += live.conflicts.numbers().values()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def together(count: int, item: gs.Intervention, **options: bool) -> list[Tensor]:
    def work(ranks: Ranks, folder: Path) -> list[Tensor]:
        return ranks.gathered(trained(ranks, item, seed=ranks.rank, **options))

    return in_ranks(count, work)


def at(reduce: Reduce = "mean") -> gs.SharedParameters:
    return gs.SharedParameters(reduce=reduce)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_mean_gradients_are_aggregated_as_in_one_process(count: int) -> None:
    aggregators = (gs.PCGrad(), gs.MGDA(), gs.GradDrop(), gs.DWA(), gs.Random(), gs.Mean())
    items = [gs.Intervention(aggregator, at=at()) for aggregator in aggregators]

    def work(ranks: Ranks, folder: Path) -> list[list[Tensor]]:
        return ranks.gathered([trained(ranks, item, seed=ranks.rank) for item in items])

    for item, (first, *others) in zip(items, zip(*in_ranks(count, work), strict=True), strict=True):
        assert all(torch.equal(other, first) for other in others), item
        expected = trained(ALONE, item)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5, msg=repr(item))


def test_local_aggregates_in_each_process_and_averages_the_results() -> None:
    first, second = together(2, gs.Intervention(gs.PCGrad(), at=at("local")))
    assert torch.equal(first, second)
    one = trained(ALONE, gs.Intervention(gs.PCGrad(), at=at()))
    assert (first - one).abs().max() > 1e-3


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view"])
def test_the_mean_holds_with_options_of_ddp(option: str) -> None:
    item = gs.Intervention(gs.PCGrad(), at=at())
    first, second = together(2, item, **{option: True})
    assert torch.equal(first, second)
    torch.testing.assert_close(first, trained(ALONE, item), rtol=1e-4, atol=1e-5)


def test_several_batches_of_a_step_are_averaged_once_and_the_conflicts_agree() -> None:
    item = gs.Intervention(gs.PCGrad(), at=gs.SharedParameters(granularity="tensor"))

    def work(ranks: Ranks, folder: Path) -> list[tuple[Tensor, list[float]]]:
        conflict: list[float] = []
        weights = trained(ranks, item, batches=2, conflict=conflict)
        return ranks.gathered((weights, conflict))

    (first, numbers), (second, others) = in_ranks(2, work)
    assert torch.equal(first, second)
    assert numbers == others
    alone: list[float] = []
    torch.testing.assert_close(
        first, trained(ALONE, item, batches=2, conflict=alone), rtol=1e-4, atol=1e-5
    )
    assert numbers == pytest.approx(alone, rel=1e-3, abs=1e-5)


def test_processes_with_other_losses_are_refused_in_each() -> None:
    def work(ranks: Ranks, folder: Path) -> list[str]:
        model = DistributedDataParallel(Heads())
        with gs.Surgery(gs.Intervention(gs.PCGrad(), at=at())).attach(model) as live:
            outputs = model(torch.ones(2, 6))
            losses = {f"{rank}": outputs[rank].sum() for rank in (0, 1 + ranks.rank)}
            with pytest.raises(RuntimeError) as caught:
                live.backward(losses)
        return ranks.gathered(str(caught.value))

    first, second = in_ranks(2, work)
    assert "found different tasks" in first
    assert "in this process 0, 1." in first
    assert "in this process 0, 2." in second


def test_the_engine_feature_needs_local() -> None:
    def work(ranks: Ranks, folder: Path) -> str:
        model = DistributedDataParallel(Heads())
        at = gs.SharedParameters(engine="feature", features="trunk")
        surgery = gs.Surgery(gs.Intervention(gs.MGDA(), at=at))
        with pytest.raises(RuntimeError) as caught:
            surgery.attach(model)
        return str(caught.value)

    assert "use engine='full', or reduce='local'" in in_ranks(2, work)


def test_the_plan_tells_of_the_processes_and_one_surgery_has_one_way() -> None:
    def work(ranks: Ranks, folder: Path) -> list[str]:
        surgeries = (gs.Surgery(gs.Intervention(gs.MGDA(), at=at(way))) for way in WAYS)
        return [surgery.plan(Heads()).splitlines()[2] for surgery in surgeries]

    assert in_ranks(2, work) == [
        "  on the mean gradient of each task over 2 processes",
        "  in each of 2 processes alone, whose results are averaged",
    ]
    trunk = gs.Intervention(gs.MGDA(), at=gs.SharedParameters("trunk.0.*"))
    other = gs.Intervention(gs.MGDA(), at=gs.SharedParameters("trunk.2.*", reduce="local"))
    with pytest.raises(ValueError, match="use reduce="):
        gs.Surgery(trunk, other).attach(Heads())


WAYS: tuple[Reduce, ...] = ("mean", "local")


def test_many_processes_with_the_same_losses_are_seen_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums over 128 processes are made here one after the other, as a ring adds them."""
    count = 128

    def all_reduce(values: Tensor, group: object) -> None:
        first = values.clone()
        for _ in range(count - 1):
            values += first

    monkeypatch.setattr(distributed, "get_world_size", lambda group: count)
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    group: Any = None
    for number in range(200):
        losses = {f"task{number}": 1.5, "other": 2.0}
        assert mean_losses(group, losses, [[0], [0]], torch.device("cpu")) == losses
