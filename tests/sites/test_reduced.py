"""Parameters with stage reduced: averaged gradients at the end of a backward pass."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.training.ranks import Ranks, in_ranks
from gradsurg.transforms.base import Transform
from tests.nets import attached, gradients, num_hooks

AT = gs.Parameters(stage="reduced")


class Gated(nn.Module):
    """Two weights, of which `second` is used only if asked: the gradient of a weight is `x`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.second = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, both: bool = True) -> dict[str, list[Tensor]]:
        result = (self.first * x).sum()
        return {"scores": [result + (self.second * x).sum() if both else result]}


def test_without_ddp_a_group_transform_acts_at_the_end_of_the_backward_pass() -> None:
    model = Gated()
    before = num_hooks(model)
    with attached(model, gs.ClipGlobalNorm(1.0), AT) as live:
        model(torch.tensor([3.0]))["scores"][0].backward()
    assert num_hooks(model) == before
    assert [float(grad) for grad in gradients(model).values()] == pytest.approx([0.5**0.5] * 2)
    assert {entry.calls for entry in live.ledger} == {1}


def test_a_parameter_that_the_pass_has_not_reached_keeps_its_gradient() -> None:
    model = Gated()
    model.second.grad = torch.tensor([5.0])
    with pytest.warns(gs.SurgeryWarning, match="second"), attached(model, gs.Scale(2.0), AT):
        model(torch.tensor([3.0]), both=False)["scores"][0].backward()
    assert [model.first.grad, model.second.grad] == [torch.tensor([6.0]), torch.tensor([5.0])]


def _averaged(ranks: Ranks, folder: Path) -> list[dict[str, list[float]]]:
    """Run one of the ranks with gradients 1, 5 (and 3), clipped to 2: the average is 3."""
    rank = ranks.rank
    x = torch.tensor([1.0, 5.0, 3.0][rank])
    found: dict[str, list[float]] = {}

    def train(name: str, transform: Transform, inner: bool = False, **options: bool) -> None:
        outer = DistributedDataParallel(Gated(), **options)
        unused = options.get("find_unused_parameters", False)
        model = outer.module if inner else outer
        with attached(model, transform, AT):
            for _ in range(3):  # the buckets are rebuilt after the first
                outer.zero_grad(set_to_none=False)
                if name == "no_sync":
                    with outer.no_sync():
                        outer(x)["scores"][0].backward()
                outer(x, both=not unused or rank == 0)["scores"][0].backward()
        found[name] = [float(param.grad) for param in outer.parameters()]

    train("plain", gs.Identity())
    train("clip", gs.Clip(2.0))
    train("inner", gs.Clip(2.0), inner=True)
    train("bucket views", gs.Clip(2.0), gradient_as_bucket_view=True)
    train("static graph", gs.Clip(2.0), static_graph=True)
    train("global norm", gs.ClipGlobalNorm(3.0))
    train("unused on a rank", gs.Clip(2.0), find_unused_parameters=True)
    train("no_sync", gs.Scale(2.0))
    return ranks.gathered(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, 3])
def test_on_several_ranks_it_acts_on_the_averaged_gradients(count: int) -> None:
    found = in_ranks(count, _averaged)
    assert found == [found[0]] * count
    norm = 3.0 / 2.0**0.5
    assert found[0] == {
        "plain": [3.0, 3.0],
        "clip": [2.0, 2.0],
        "inner": [2.0, 2.0],
        "bucket views": [2.0, 2.0],
        "static graph": [2.0, 2.0],
        "global norm": [pytest.approx(norm), pytest.approx(norm)],
        "unused on a rank": [2.0, pytest.approx(1 / count)],
        "no_sync": [12.0, 12.0],
    }
