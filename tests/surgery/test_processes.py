"""Two processes under DistributedDataParallel: triggers and seeds agree where gradients do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Selector
from gradsurg.training.ranks import Ranks, in_ranks
from gradsurg.transforms.base import Transform
from gradsurg.triggers.base import Decision, Trigger, TriggerContext
from tests.nets import gradients

STEP = gs.Parameters(stage="step")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(ranks: Ranks, surgery: gs.Surgery) -> Tensor:
    """The weights after ten steps, in which the second process has other examples."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    with surgery.attach(model, optimizer):
        for step in range(10):
            size = 8 if (step + ranks.rank) % 2 else 5
            inputs = torch.randn(size, 6, generator=generator) * (1 + ranks.rank)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [STEP, gs.Parameters(stage="backward_end")], ids=["step", "end"])
@pytest.mark.parametrize(
    ("transform", "when"),
    [
        (gs.Scale(0.1), gs.Threshold(source="batch", measure="norm", above=6.0)),
        (gs.Scale(0.1), ~gs.Shape(source="batch", dim=0, above=7)),
        (gs.AddNoise(eta=0.1, gamma=0.0), gs.Always()),
        (gs.Scale(0.1), gs.Probability(0.5)),
    ],
    ids=["threshold", "shape", "noise", "probability"],
)
def test_the_weights_stay_equal(transform: Transform, when: Trigger, at: Selector) -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[list[float]]]:
        item = gs.Intervention(transform, at=at, when=when)
        weights = trained(ranks, gs.Surgery(item, seed=ranks.rank))
        untouched = trained(ranks, gs.Surgery())
        return ranks.gathered([weights.tolist(), untouched.tolist()])

    (first, untouched), (second, _) = in_ranks(2, work)
    assert first == second
    assert first != untouched


@validated
class OfRank(Trigger):
    """A user's trigger that decides differently in each process, once a step or at each site."""

    rank: int = 0
    at_sites: bool = False

    def fires(self, context: TriggerContext) -> Decision:
        if self.at_sites and context.site is None:
            return None
        return (self.rank + context.step) % 2 == 0


def switched(ranks: Ranks, item: gs.Intervention) -> list[float]:
    """The weights after steps in which each process sets the switch `f` by its own rule."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gs.Surgery(item).attach(model, optimizer) as live:
        for step in range(4):
            if isinstance(item.when, gs.Flag):
                live.switch("f", on=(step + ranks.rank) % 2 == 0)
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [STEP, gs.Parameters(stage="backward_end")], ids=["step", "end"])
@pytest.mark.parametrize("when", [gs.Flag("f"), OfRank(), OfRank(at_sites=True)], ids=str)
def test_switches_and_own_triggers_decide_as_in_process_0(when: Trigger, at: Selector) -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[list[float]]]:
        own = replace(when, rank=ranks.rank) if isinstance(when, OfRank) else when
        triggers = (own, gs.Always())
        items = [gs.Intervention(gs.Scale(0.1), at, trigger) for trigger in triggers]
        return ranks.gathered([switched(ranks, item) for item in items])

    (first, always), (second, _) = in_ranks(2, work)
    assert first == second
    assert first != always


@pytest.mark.filterwarnings("ignore")
def test_noise_before_the_average_is_another_in_each_process() -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[float]]:
        model = network()
        item = gs.Intervention(gs.AddNoise(eta=1.0, gamma=0.0), at=gs.Outputs("0"))
        with gs.Surgery(item).attach(model):
            model(torch.ones(8, 6)).square().mean().backward()
        return ranks.gathered(next(iter(gradients(model).values())).flatten().tolist())

    first, second = in_ranks(2, work)
    assert first != second


@pytest.mark.filterwarnings("ignore")
def test_a_fixed_random_matrix_is_the_same_in_each_process() -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[float]]:
        context = gs.transforms.base.TransformContext("site", rank=ranks.rank)
        return ranks.gathered(
            [
                context.generator(torch.device("cpu"), per_call=same).initial_seed()
                for same in (False, True)
            ]
        )

    first, second = in_ranks(2, work)
    assert first[0] == second[0]
    assert first[1] != second[1]
