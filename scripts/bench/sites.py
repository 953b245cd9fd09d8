"""Benchmark site kinds: microseconds of each kind and of a hand-written hook of the same kind.

python -m scripts.bench sites

The hand-written hook is the minimum that does the same to the gradients of this network: the same
clamp in the same hook, registered in each forward pass if the kind needs that. It handles no calls,
copies of the model, recomputations, autocast or threads, has no switch, counts nothing and checks
no result; on an input it misses keyword arguments and modifications in place. Arms take turns, with
untimed steps before the timed ones: otherwise an arm that follows itself, at the ends of the
alternating order, would start with warm processor caches. Times are CPU times on one thread: other
processes disturb them less than wall times.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.turns import Arm, beginning, cpu_seconds, in_turns

BOUND = 0.001
LAYERS = 24
STEPS = 5  # timed in a turn, one by one
WARM = 2  # before them, not timed
LEAST = 5  # steps whose mean stands for the minimum


def clamp(grad: Any) -> Any:  # Any: hooks are typed in many ways
    return grad.clamp(-BOUND, BOUND)


def network() -> tuple[nn.Module, Tensor]:
    """Return a deep, narrow network, where hooks cost the most."""
    layers = [nn.Linear(32, 32) for _ in range(LAYERS)]
    return nn.Sequential(*layers), torch.randn(8, 32, requires_grad=True)


def seconds(arm: Arm) -> list[float]:
    """Return the seconds of the timed steps of one turn."""
    timed = cpu_seconds(arm.step)
    return [timed() for _ in range(WARM + STEPS)][WARM:]


def of_layers(hook: Callable[[Any], Any]) -> Callable[[Arm], None]:
    def by_hand(arm: Arm) -> None:
        for layer in arm.model.children():
            arm.stack.callback(hook(layer).remove)

    return by_hand


def accumulated(param: Any) -> None:
    param.grad = clamp(param.grad)


def before_step(arm: Arm) -> None:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for layer in arm.model.children():
            accumulated(layer.weight)

    arm.optimizer.register_step_pre_hook(hook)


def on_output(layer: nn.Module) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(clamp)

    return layer.register_forward_hook(hook)


def on_input(layer: nn.Module) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor]) -> None:
        if not args[0].is_leaf:  # on a leaf it would be one more at every call
            args[0].register_hook(clamp)

    return layer.register_forward_pre_hook(hook)


def on_branch(layer: nn.Module) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        alias = args[0].view_as(args[0])
        alias.register_hook(clamp)
        return alias

    return layer.register_forward_pre_hook(hook)


def on_node(layer: nn.Module) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        node = output.grad_fn
        assert node is not None
        node.register_prehook(lambda grads: (clamp(grads[0]),))

    return layer.register_forward_hook(hook)


def behind_node(layer: nn.Module) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        node = output.grad_fn
        assert node is not None
        node.register_hook(
            lambda grads, _: (grads[0], clamp(grads[1]), grads[2])  # the edge of the layer's input
        )

    return layer.register_forward_hook(hook)


KINDS: dict[str, tuple[Callable[[Arm], None], Callable[[], Selector]]] = {
    "parameters backward": (
        of_layers(lambda layer: layer.weight.register_hook(clamp)),
        lambda: gs.Parameters("*.weight"),
    ),
    "parameters accumulated": (
        of_layers(lambda one: one.weight.register_post_accumulate_grad_hook(accumulated)),
        lambda: gs.Parameters("*.weight", stage="accumulated"),
    ),
    "parameters step": (before_step, lambda: gs.Parameters("*.weight", stage="step")),
    "outputs": (of_layers(on_output), lambda: gs.Outputs()),
    "inputs branch": (of_layers(on_branch), lambda: gs.Inputs()),
    "inputs total": (of_layers(on_input), lambda: gs.Inputs(path="total")),
    "module gradients": (
        of_layers(lambda layer: layer.register_full_backward_pre_hook(lambda _, g: (clamp(g[0]),))),
        lambda: gs.ModuleGradients(),
    ),
    "values": (
        of_layers(lambda layer: layer.register_forward_hook(lambda _, __, out: clamp(out))),
        lambda: gs.Activations(),
    ),
    "nodes enter": (of_layers(on_node), lambda: gs.Nodes("Addmm")),
    "nodes leave": (of_layers(behind_node), lambda: gs.Nodes("Addmm", side="leave", edge=1)),
}


def measure(kind: str, rounds: int) -> list[str]:
    """Return one line: site costs from minima; step times from medians, and from minima."""
    by_hand, selector = KINDS[kind]
    with ExitStack() as stack:
        arms = {name: Arm(network, stack) for name in ("plain", "hand", "ours")}
        by_hand(arms["hand"])
        arms["ours"].attach(gs.Clip(BOUND), selector())
        turns = in_turns({name: partial(seconds, arm) for name, arm in arms.items()}, rounds)
    times = {name: [1e6 * x for steps in own for x in steps] for name, own in turns.items()}
    middle = {name: median(own) for name, own in times.items()}
    least = {name: mean(sorted(own)[:LEAST]) for name, own in times.items()}
    sites = [(least[name] - least["plain"]) / LAYERS for name in ("hand", "ours")]
    step = f"{middle['ours'] / middle['hand']:.3f} ({least['ours'] / least['hand']:.3f})"
    return [kind, *(f"{micros:.1f}" for micros in (*sites, sites[1] - sites[0])), step]


def table(rounds: int, only: list[str]) -> str:
    """Return one line for each kind whose name starts with one of `only`."""
    torch.set_num_threads(1)
    head = ["kind", "by hand, us a site", "gradsurg", "more", "step time, ratio (of minima)"]
    return aligned([head, *(measure(kind, rounds) for kind in beginning(KINDS, only))])
