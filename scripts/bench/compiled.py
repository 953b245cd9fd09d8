"""Benchmark compiled models: graphs of each kind of site, and steps of hooks written by hand.

python -m scripts.bench compiled [--rounds 60]

A row has the number of graphs that Dynamo makes of an MLP of 12 linear layers, without and with
effects, and the CPU time of a step without effects as a ratio of the same hooks written by hand.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.turns import Arm, cpu_seconds, in_turns, ratio

BOUND, LAYERS, WIDTH, WARM = 0.01, 12, 128, 10


def network() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, WIDTH)


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


def graphs(at: Selector, every: int) -> int:
    """Return how many graphs a model is compiled to while a `Clip` acts at these sites."""
    torch.compiler.reset()
    made: list[object] = []

    def count(graph: Callable[..., Any], inputs: object) -> Callable[..., Any]:
        made.append(graph)
        return graph

    with ExitStack() as stack:
        arm = Arm(network, stack)
        arm.call = torch.compile(arm.model, backend=count)
        arm.attach(gs.Clip(BOUND), at, every)
        arm.step()
    return len(made)


def over_hand(at: Selector, by_hand: Callable[[nn.Module], None], rounds: int) -> str:
    """Return the time of a step as a ratio of the same hooks written by hand."""
    torch.compiler.reset()
    with ExitStack() as stack:
        hand, ours = Arm(network, stack), Arm(network, stack)
        for layer in hand.model.children():
            if isinstance(layer, nn.Linear):
                by_hand(layer)
        ours.attach(gs.Clip(BOUND), at)
        for arm in (hand, ours):
            arm.call = torch.compile(arm.model, backend="inductor")
        ways = {"hand": cpu_seconds(hand.step), "ours": cpu_seconds(ours.step)}
        times = in_turns(ways, rounds, WARM)
    return ratio(times["ours"], times["hand"])


def table(rounds: int) -> str:
    """Return one line for each kind of site."""
    rows = [["site", "graphs", "with effects", "step / by hand"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (at, by_hand) in SITES.items():
            made = over_hand(at, by_hand, rounds) if by_hand else "-"
            rows.append([name, f"{graphs(at, 0)}", f"{graphs(at, 1)}", made])
    return aligned(rows)
