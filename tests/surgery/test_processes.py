"""Two processes under DistributedDataParallel: triggers and seeds agree where gradients do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform
from gradsurg.triggers.base import Decision, Trigger, TriggerContext
from tests.forks import Ranks, in_ranks
from tests.nets import gradients

STEP = gs.Parameters(stage="step")
pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(ranks: Ranks, surgery: gs.Surgery, steps: int = 10) -> list[float]:
    """The weights after some steps, in which the second process has other examples.

    Each process sets the switch `f`, where there is one, by its own rule.
    """
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    with surgery.attach(model, optimizer) as live:
        for step in range(steps):
            if any(isinstance(item.when, gs.Flag) for item in surgery.interventions):
                live.switch("f", on=(step + ranks.rank) % 2 == 0)
            size = 8 if (step + ranks.rank) % 2 else 5
            inputs = torch.randn(size, 6, generator=generator) * (1 + ranks.rank)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


@validated
class OfRank(Trigger):
    """A user's trigger that decides differently in each process, once a step or at each site."""

    rank: int = 0
    at_sites: bool = False

    def fires(self, context: TriggerContext) -> Decision:
        if self.at_sites and context.site is None:
            return None
        return (self.rank + context.step) % 2 == 0


SCALE, ALWAYS = gs.Scale(0.1), gs.Always()


CASES: dict[str, tuple[Transform, Trigger, Trigger | None]] = {
    "threshold": (SCALE, gs.Threshold(source="batch", measure="norm", above=6.0), None),
    "shape": (SCALE, ~gs.Shape(source="batch", dim=0, above=7), None),
    "noise": (gs.AddNoise(eta=0.1, gamma=0.0), ALWAYS, None),
    "probability": (SCALE, gs.Probability(0.5), None),
    "switch": (SCALE, gs.Flag("f"), ALWAYS),
    "own": (SCALE, OfRank(), ALWAYS),
    "own at sites": (SCALE, OfRank(at_sites=True), ALWAYS),
}
"""A transform, its trigger, and the trigger of the other surgery, which may have none."""


@pytest.mark.parametrize("at", [STEP, gs.Parameters(stage="backward_end")], ids=["step", "end"])
def test_the_weights_stay_equal_and_are_not_those_of_another_surgery(at: Selector) -> None:
    def work(ranks: Ranks, folder: Path) -> list[dict[str, list[list[float]]]]:
        weights = {}
        for name, (transform, when, other) in CASES.items():
            own = replace(when, rank=ranks.rank) if isinstance(when, OfRank) else when
            surgery = gs.Surgery(gs.Intervention(transform, at, own), seed=ranks.rank)
            items = [gs.Intervention(transform, at, other)] if other else []
            steps = 4 if other else 10
            weights[name] = [trained(ranks, each, steps) for each in (surgery, gs.Surgery(*items))]
        return ranks.gathered(weights)

    first, second = in_ranks(2, work)
    for name in CASES:
        own, other = first[name]
        assert own == second[name][0], name
        assert own != other, name


def test_noise_before_the_average_is_another_in_each_process() -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[float]]:
        model = network()
        item = gs.Intervention(gs.AddNoise(eta=1.0, gamma=0.0), at=gs.Outputs("0"))
        with gs.Surgery(item).attach(model):
            model(torch.ones(8, 6)).square().mean().backward()
        return ranks.gathered(next(iter(gradients(model).values())).flatten().tolist())

    first, second = in_ranks(2, work)
    assert first != second


def test_a_fixed_random_matrix_is_the_same_in_each_process() -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[float]]:
        context = gs.transforms.base.TransformContext("site", rank=ranks.rank)
        generators = (context.generator(torch.device("cpu"), per_call=b) for b in (False, True))
        return ranks.gathered([generator.initial_seed() for generator in generators])

    first, second = in_ranks(2, work)
    assert first[0] == second[0]
    assert first[1] != second[1]
