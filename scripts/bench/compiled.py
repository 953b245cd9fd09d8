"""Benchmark compiled models: graphs of each kind of site, and steps of hooks written by hand.

python -m scripts.bench compiled [--rounds 60]

A row has the number of graphs that Dynamo makes of an MLP of 12 linear layers, without and with
effects, and the CPU time of a step without effects as a ratio of the same hooks written by hand.
"""

import warnings
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.turns import cpu_seconds, in_turns

BOUND, LAYERS, WIDTH, WARM = 0.01, 12, 128, 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-BOUND, BOUND)


def at_parameters(layer: nn.Module) -> None:
    for param in layer.parameters():
        param.register_hook(clamp)


def at_outputs(layer: nn.Module) -> None:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(clamp)

    layer.register_forward_hook(hook)


def at_inputs(layer: nn.Module) -> None:
    def hook(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        alias = args[0][...]
        if alias.requires_grad:
            alias.register_hook(clamp)
        return (alias,)

    layer.register_forward_pre_hook(hook)


SITES: dict[str, tuple[Selector, Callable[[nn.Module], None] | None]] = {
    "Parameters": (gs.Parameters(), at_parameters),
    "Outputs": (gs.Outputs(types="Linear"), at_outputs),
    "Inputs": (gs.Inputs(types="Linear"), at_inputs),
    "ModuleGradients": (gs.ModuleGradients(types="Linear"), None),
    "Activations": (gs.Activations(types="Linear"), None),
}


class Arm:
    """A compiled model, trained on another batch in each step."""

    def __init__(self) -> None:
        self.model, self.graphs = Net(), 0
        self.batches = cycle([torch.randn(64, WIDTH) for _ in range(16)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def compile(self, backend: Any) -> None:
        self.call: Any = torch.compile(self.model, backend=backend)

    def count(self, graph: Callable[..., Any], inputs: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.call(next(self.batches)).square().mean().backward()
        self.optimizer.step()


def graphs(at: Selector, every: int) -> int:
    """Return how many graphs a model is compiled to while a `Clip` acts at these sites."""
    torch.compiler.reset()
    arm = Arm()
    arm.compile(arm.count)
    with gs.Surgery(gs.Intervention(gs.Clip(BOUND), at)).attach(arm.model, effects_every=every):
        arm.step()
    return arm.graphs


def ratio(at: Selector, by_hand: Callable[[nn.Module], None], rounds: int) -> str:
    """Return the time of a step as a ratio of the same hooks written by hand, of the medians."""
    torch.compiler.reset()
    hand, ours = Arm(), Arm()
    for layer in hand.model.layers:
        by_hand(layer)
    surgery = gs.Surgery(gs.Intervention(gs.Clip(BOUND), at))
    with surgery.attach(ours.model, ours.optimizer, effects_every=0):
        for arm in (hand, ours):
            arm.compile("inductor")
        ways = {"hand": cpu_seconds(hand.step), "ours": cpu_seconds(ours.step)}
        times = in_turns(ways, rounds, WARM)
    return f"{median(times['ours']) / median(times['hand']):.3f}"


def table(rounds: int) -> str:
    """Return one line for each kind of site."""
    rows = [["site", "graphs", "with effects", "step / by hand"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (at, by_hand) in SITES.items():
            made = ratio(at, by_hand, rounds) if by_hand else "-"
            rows.append([name, f"{graphs(at, 0)}", f"{graphs(at, 1)}", made])
    return aligned(rows)
