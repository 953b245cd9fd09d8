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
from statistics import mean, median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.turns import in_turns

BOUND = 0.001
LAYERS = 24
STEPS = 5  # timed in a turn, one by one
WARM = 2  # before them, not timed
LEAST = 5  # steps whose mean stands for the minimum


def clamp(grad: Any) -> Any:  # Any: hooks are typed in many ways
    return grad.clamp(-BOUND, BOUND)


class Arm:
    """One way of training a deep, narrow network, where hooks cost the most."""

    def __init__(self, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.layers = [nn.Linear(32, 32) for _ in range(LAYERS)]
        self.model = nn.Sequential(*self.layers)
        self.inputs = torch.randn(8, 32, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.stack = stack

    def seconds(self) -> list[float]:
        """Return the seconds of the timed steps of one turn."""
        times = []
        for _ in range(WARM + STEPS):
            began = process_time()
            self.optimizer.zero_grad()
            self.model(self.inputs).sum().backward()
            self.optimizer.step()
            times.append(process_time() - began)
        return times[WARM:]


def surgery(arm: Arm, at: Selector) -> None:
    item = gs.Intervention(gs.Clip(BOUND), at=at)
    attached = gs.Surgery(item).attach(arm.model, arm.optimizer, effects_every=0)
    arm.stack.enter_context(attached)


def of_weights(hook: Callable[[Any], Any]) -> Callable[[Arm], None]:
    def by_hand(arm: Arm) -> None:
        for layer in arm.layers:
            arm.stack.callback(hook(layer.weight).remove)

    return by_hand


def of_layers(hook: Callable[[nn.Module], Any]) -> Callable[[Arm], None]:
    def by_hand(arm: Arm) -> None:
        for layer in arm.layers:
            arm.stack.callback(hook(layer).remove)

    return by_hand


def accumulated(param: Tensor) -> None:
    param.grad = clamp(param.grad)


def before_step(arm: Arm) -> None:
    weights = [layer.weight for layer in arm.layers]

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for weight in weights:
            accumulated(weight)

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
        of_weights(lambda param: param.register_hook(clamp)),
        lambda: gs.Parameters("*.weight"),
    ),
    "parameters accumulated": (
        of_weights(lambda param: param.register_post_accumulate_grad_hook(accumulated)),
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
        arms = {name: Arm(stack) for name in ("plain", "hand", "ours")}
        by_hand(arms["hand"])
        surgery(arms["ours"], selector())
        turns = in_turns({name: arm.seconds for name, arm in arms.items()}, rounds)
    times = {name: [1e6 * x for steps in own for x in steps] for name, own in turns.items()}
    middle = {name: median(own) for name, own in times.items()}
    least = {name: mean(sorted(own)[:LEAST]) for name, own in times.items()}
    sites = [(least[name] - least["plain"]) / LAYERS for name in ("hand", "ours")]
    step = f"{middle['ours'] / middle['hand']:.3f} ({least['ours'] / least['hand']:.3f})"
    return [kind, *(f"{micros:.1f}" for micros in (*sites, sites[1] - sites[0])), step]


def table(rounds: int, only: list[str]) -> str:
    """Return one line for each kind whose name starts with one of `only`."""
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if any(kind.startswith(wanted) for wanted in only)]
    head = ["kind", "by hand, us a site", "gradsurg", "more", "step time, ratio (of minima)"]
    return aligned([head, *(measure(kind, rounds) for kind in kinds)])
