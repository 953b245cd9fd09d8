"""Aggregators of sharded parameters: the update of one process with all examples."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, NormMatchedSum
from tests.forks import ALONE, Ranks, in_ranks

STEPS = 3

CASES: dict[str, Callable[[], tuple[Aggregator, gs.SharedParameters]]] = {
    "upgrad": lambda: (gs.UPGrad(), gs.SharedParameters()),
    "pcgrad of layers": lambda: (gs.PCGrad(), gs.SharedParameters(granularity="layer")),
    "mgda of tensors": lambda: (gs.MGDA(), gs.SharedParameters(granularity="tensor")),
    "cagrad of the trunk": lambda: (gs.CAGrad(), gs.SharedParameters("trunk.*")),
    "norm matched": lambda: (NormMatchedSum(gs.MGDA()), gs.SharedParameters()),
    "and_mask": lambda: (gs.AndMask(), gs.SharedParameters()),
    "famo": lambda: (gs.FAMO(), gs.SharedParameters()),
    "dependent": lambda: (gs.CAGrad(), gs.SharedParameters()),
    "two calls": lambda: (gs.MGDA(), gs.SharedParameters()),
    "clipped": lambda: (gs.MGDA(), gs.SharedParameters()),
    "skip": lambda: (gs.UPGrad(), gs.SharedParameters(on_nonfinite="skip")),
}


class Net(nn.Module):
    """Three heads, one of a single unit, which not every process has a part of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
        self.breaks = False

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.trunk(x).tanh()
        outputs = [head(features) for head in self.heads]
        if self.breaks:  # the gradient of one head alone
            nan = self.heads[1](features.detach()) * 0
            nan.register_hook(lambda grad: grad * torch.nan)
            outputs[1] = outputs[1] + nan
        return outputs


def _shard(model: Net, ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.count,))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _losses(model: Net, step: int, ranks: Ranks, case: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
    model.breaks = case == "skip" and step == 1
    x, y = x.chunk(ranks.count)[ranks.rank], y.chunk(ranks.count)[ranks.rank]
    outputs = model(x)
    losses = {str(i): (outputs[i][:, 0] - y[:, i]).square().mean() for i in range(3)}
    if case == "dependent":
        losses["1"] = losses["0"] * 2
    return losses


def _trained(case: str, ranks: Ranks) -> tuple[list[Tensor], list[float]]:
    """Return the weights, and the measured conflict at each step."""
    aggregator, at = CASES[case]()
    model = Net()
    if ranks.count > 1:
        _shard(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = gs.Intervention(gs.Clip(0.05), gs.Parameters(stage="accumulated"))
    surgery = gs.Surgery(gs.Intervention(aggregator, at), *[clip] * (case == "clipped"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with surgery.attach(model, optimizer, effects_every=1) as live:
            for step in range(STEPS):
                optimizer.zero_grad()
                if case == "two calls":
                    live.backward(_losses(model, step + STEPS, ranks), aggregate=False)
                live.backward(_losses(model, step, ranks, case))
                optimizer.step()
            cosines = [each.cosine_to_mean for each in live.conflicts.fetch()]
    weights = [
        (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for param in model.parameters()
    ]
    return weights, cosines


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_update_is_that_of_one_process(count: int) -> None:
    def work(ranks: Ranks, folder: Path) -> dict[str, tuple[list[Tensor], list[float]]]:
        return {case: _trained(case, ranks) for case in CASES}

    results = in_ranks(count, work)
    for case, (weights, cosines) in results.items():
        expected, measured = _trained(case, ALONE)
        assert len(cosines) == len(measured) > 0
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, msg=case)
        torch.testing.assert_close(cosines, measured, rtol=1e-5, atol=1e-5, msg=case)


class FirstTask(Aggregator):
    """The gradient of the first task."""

    def init(self, num_tasks: int) -> dict[str, Tensor]:
        return {}

    def merge(
        self, rows: Tensor, state: dict[str, Tensor], context: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return rows[0], state


REFUSED = {
    "engine='feature'": (gs.MGDA(), gs.SharedParameters(engine="feature", features="trunk")),
    "reduce='local'": (gs.MGDA(), gs.SharedParameters(reduce="local")),
    "FirstTask reads whole rows": (FirstTask(), gs.SharedParameters()),
    "some parameters are not sharded": (gs.MGDA(), gs.SharedParameters()),
}


def test_what_has_no_update_by_parts_is_refused() -> None:
    def work(ranks: Ranks, folder: Path) -> None:
        for reason, (aggregator, at) in REFUSED.items():
            model = Net()
            if "some" in reason:
                fully_shard(model.trunk, mesh=init_device_mesh("cpu", (ranks.count,)))
            else:
                _shard(model, ranks)
            with pytest.raises(TypeError, match=reason):
                gs.Surgery(gs.Intervention(aggregator, at)).attach(model)
        _shard(model := Net(), ranks)
        with gs.Surgery(gs.Intervention(gs.MGDA(), gs.SharedParameters())).attach(model) as live:
            losses = _losses(model, 0, ranks)
            with pytest.raises(TypeError, match=r"live\.jacobian: call it without fully_shard"):
                live.jacobian(losses)
            names = ["0", "1"] if ranks.rank else ["0", "2"]
            with pytest.raises(RuntimeError, match="found different tasks"):
                live.backward({name: losses[name] for name in names})
            live.backward(losses)

    in_ranks(2, work)
