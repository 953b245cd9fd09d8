"""Pitfalls of several processes: gradients that are averaged or sharded after a hook."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.sites.base import Selector
from gradsurg.training.ranks import Ranks, in_ranks
from tests.nets import attached, backward, gradients, num_hooks, sgd, small


def join(store: Path, rank: int = 0, size: int = 1) -> None:
    """Initialize the process group."""
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    join(tmp_path / "store")
    yield
    distributed.destroy_process_group()


CLIP = gs.Clip(0.5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("inner", [False, True])
def test_p26_the_end_of_a_backward_comes_after_the_average(inner: bool) -> None:
    model = small()
    outer = DistributedDataParallel(model)
    before = num_hooks(outer)
    with attached(model if inner else outer, gs.Zero(), gs.Parameters(stage="backward_end")):
        for called in (model, outer):  # by itself nothing is averaged
            backward(called)
            assert not any(grad.any() for grad in gradients(model).values())
    assert num_hooks(outer) == before


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", ["backward", "accumulated", "step"])
def test_p26_the_other_stages_reach_the_optimizer(stage) -> None:
    model = DistributedDataParallel(small())
    optimizer = sgd(model)
    before = [param.detach().clone() for param in model.parameters()]
    # In one process each gradient is the average: nothing is said.
    with attached(model, gs.Zero(), gs.Parameters(stage=stage), optimizer):
        backward(model)
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attached(model, gs.Clip(0.1), gs.Parameters(stage=stage), optimizer):
            backward(model)
            optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("inner", [False, True], ids=["wrapped", "inner"])
def test_an_aggregator_is_refused_under_ddp_with_a_static_graph(inner: bool) -> None:
    for static in (False, True):
        outer = DistributedDataParallel(small(), static_graph=static)
        model, before = outer.module if inner else outer, num_hooks(outer)

        def train(model: nn.Module = model, outer: nn.Module = outer) -> None:
            surgery = gs.Surgery(gs.Intervention(gs.Sum(), gs.SharedParameters()))
            with surgery.attach(model, sgd(model)) as live:
                scores = outer(torch.ones(2, 6))
                live.backward({"a": scores[:, 0].sum(), "b": scores[:, 1].square().sum()})

        if static:
            with pytest.raises(RuntimeError, match=r"static_graph=True.*static_graph=False"):
                train()
        else:
            train()
        assert num_hooks(outer) == before


class Two(nn.Module):
    """A model with one weight, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _of_two(ranks: Ranks, folder: Path) -> list[list[tuple[str, str, float, list[str]]]]:
    """Run one of two ranks with gradients 1.0 and -0.2, clipped to 0.5."""
    rank = ranks.rank
    results: list[tuple[str, str, float, list[str]]] = []
    for stage, transform in (("backward", CLIP), ("step", CLIP), ("backward", gs.Scale(0.5))):
        for inner in (False, True):
            outer = DistributedDataParallel(Two())
            optimizer = sgd(outer, lr=1.0)
            model = outer.module if inner else outer
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with attached(model, transform, gs.Parameters(stage=stage), optimizer):
                    outer(torch.tensor([1.0, -0.2][rank])).backward()
                    optimizer.step()
            texts = [
                str(warning.message) for warning in caught if warning.category is gs.SurgeryWarning
            ]
            results.append((stage, repr(transform), -outer.module.weight.item(), texts))
    return ranks.gathered(results)


def test_p26_acting_on_each_rank_before_averaging_warns() -> None:
    for results in in_ranks(2, _of_two):
        assert len(results) == 6
        for stage, transform, moved, texts in results:
            if transform != repr(CLIP):
                assert moved == pytest.approx(0.5 * (1.0 - 0.2) / 2)
                assert texts == []
            elif stage == "backward":
                assert moved == pytest.approx((0.5 - 0.2) / 2)
                (text,) = texts
                assert "each of 2 processes" in text
                assert "stage='step'" in text
            else:
                assert moved == pytest.approx((1.0 - 0.2) / 2)
                assert texts == []


def sharded() -> nn.Module:
    """A model with DTensor parameters, sharded over this process alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.usefixtures("alone")
def test_p27_sharded_parameters_without_tensor_hooks_are_refused() -> None:
    model, fired = sharded(), []
    model.first.weight.register_hook(lambda grad: fired.append(grad))
    backward(model)
    assert fired == []
    assert model.first.weight.grad is not None
    optimizer = sgd(model)
    before = num_hooks(model, optimizer)
    stages = [stage for stage in gs.Parameters.stages if stage not in ("accumulated", "step")]
    refused = [gs.Parameters(stage=stage) for stage in stages]
    for at in (*refused, gs.Weights(), gs.Captured("first.weight")):
        with (
            pytest.raises(TypeError, match="parameter 'first.weight' is a DTensor.*stage='step'"),
            attached(model, gs.Scale(2.0), at, optimizer),
        ):
            pass
    assert num_hooks(model, optimizer) == before


@pytest.mark.usefixtures("alone")
def test_p27_the_suggested_stage_acts_on_a_sharded_model() -> None:
    suggested: list[Selector] = [
        gs.Outputs("first"),
        gs.Inputs("act"),
        gs.Nodes("Addmm", module="first"),
        gs.Parameters("first.weight", stage="accumulated"),
    ]
    for at in suggested:
        grads = []
        for factor in (1.0, 3.0):
            model = sharded()
            with attached(model, gs.Scale(factor), at) as live:
                backward(model)
            assert {entry.calls for entry in live.ledger} == {1}
            grads.append(gradients(model)["first.weight"].full_tensor())
        torch.testing.assert_close(grads[1], 3.0 * grads[0])
