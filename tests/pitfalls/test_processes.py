"""Pitfalls of several processes: gradients that are averaged or sharded after a hook.

The columns DDP and FSDP2 of the table of contexts have what acts there and what is refused.
"""

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.sites.places import Selector
from tests.forks import Ranks, in_ranks
from tests.nets import attached, backward, num_hooks, sgd, small

CLIP = gs.Clip(0.5)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", gs.Parameters.stages)
def test_p26_in_one_process_each_gradient_is_the_average(stage) -> None:
    model = DistributedDataParallel(small())
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attached(model, gs.Clip(0.1), gs.Parameters(stage=stage), optimizer):
            backward(model)
            optimizer.step()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("static", [False, True])
def test_an_aggregator_is_refused_when_a_static_graph_is_called(static: bool) -> None:
    outer = DistributedDataParallel(small(), static_graph=static)
    model, before = outer.module, num_hooks(outer)
    surgery = gs.Surgery(gs.Intervention(gs.Sum(), gs.SharedParameters()))
    refused = pytest.raises(RuntimeError, match=r"static_graph=True.*static_graph=False")
    with refused if static else nullcontext(), surgery.attach(model, sgd(model)) as live:
        scores = outer(torch.ones(2, 6))
        live.backward({"a": scores[:, 0].sum(), "b": scores[:, 1].square().sum()})
    assert num_hooks(outer) == before


class Two(nn.Module):
    """A model with one weight, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


MOVED = {
    ("backward", CLIP): (0.5 - 0.2) / 2,
    ("step", CLIP): (1.0 - 0.2) / 2,
    ("backward", gs.Scale(0.5)): 0.5 * (1.0 - 0.2) / 2,
}
"""The step of SGD with gradients 1.0 and -0.2 in two processes, by stage and transform."""


def _of_two(ranks: Ranks, folder: Path) -> list[list[tuple[float, list[str]]]]:
    results: list[tuple[float, list[str]]] = []
    for stage, transform in MOVED:
        for inner in (False, True):
            outer = DistributedDataParallel(Two())
            optimizer = sgd(outer, lr=1.0)
            model = outer.module if inner else outer
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with attached(model, transform, gs.Parameters(stage=stage), optimizer):
                    outer(torch.tensor([1.0, -0.2][ranks.rank])).backward()
                    optimizer.step()
            texts = [str(item.message) for item in caught if item.category is gs.SurgeryWarning]
            results.append((-outer.module.weight.item(), texts))
    return ranks.gathered(results)


def test_p26_acting_on_each_rank_before_averaging_warns() -> None:
    for results in in_ranks(2, _of_two):
        cases = [case for case in MOVED.items() for _ in range(2)]
        for ((stage, transform), expected), (moved, texts) in zip(cases, results, strict=True):
            assert moved == pytest.approx(expected)
            if (stage, transform) == ("backward", CLIP):
                (text,) = texts
                assert "each of 2 processes" in text
                assert "stage='step'" in text
            else:
                assert texts == []


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("at", [gs.Parameters("*.bias"), gs.Captured("first.weight")], ids=repr)
def test_p27_a_sharded_parameter_beside_others_is_refused_by_name(at: Selector) -> None:
    model, fired = small(), []
    fully_shard(model.first, mesh=init_device_mesh("cpu", (1,)))
    model.first.weight.register_hook(fired.append)
    backward(model)
    assert fired == [], "the hooks of a DTensor run"
    before = num_hooks(model)
    with pytest.raises(TypeError, match="site 'first.*DTensors.*stage='step'"):
        attached(model, gs.Scale(2.0), at)
    assert num_hooks(model) == before
