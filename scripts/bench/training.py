"""Benchmark training with and without surgery: ratios of step times, measured alternately.

python -m scripts.bench training [--rounds 60] [--threads 1 2] [--only mlp]
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.models import convnet, mlp, transformer
from scripts.bench.sites import BOUND, clamp, on_node, on_output
from scripts.bench.turns import Arm, beginning, cpu_seconds, in_turns, ratio

STEPS = 10  # steps timed together: one of them is measured in the arm `tenth`
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
}


def clamp_parameters(arm: Arm) -> None:
    for param in arm.model.parameters():
        param.register_hook(clamp)


def clamp_relus(arm: Arm, hook: Callable[[nn.Module], object]) -> None:
    for module in arm.model.modules():
        if isinstance(module, nn.ReLU):
            hook(module)


SITES: dict[str, tuple[Callable[[], Selector], Callable[[Arm], None]]] = {
    "parameters": (gs.Parameters, clamp_parameters),
    "ReLU outputs": (lambda: gs.Outputs(types="ReLU"), partial(clamp_relus, hook=on_output)),
    "ReLU nodes": (lambda: gs.Nodes("Relu"), partial(clamp_relus, hook=on_node)),
}


def torch_clip(arm: Arm) -> None:
    params = list(arm.model.parameters())
    arm.before_step = lambda: nn.utils.clip_grad_norm_(params, 1.0)


def arms_at(site: str) -> dict[str, Callable[[Arm], object]]:
    """Return what each arm does to a model before it is trained."""
    at, by_hand = SITES[site]
    arms: dict[str, Callable[[Arm], object]] = {
        "plain": lambda arm: None,
        "hand": by_hand,
        "clip": lambda arm: arm.attach(gs.Clip(BOUND), at()),
        "tenth": lambda arm: arm.attach(gs.Clip(BOUND), at(), every=10),
        "every": lambda arm: arm.attach(gs.Clip(BOUND), at(), every=1),
    }
    if site == "parameters":
        arms |= {"torch": torch_clip, "global": lambda arm: arm.attach(gs.ClipGlobalNorm(1.0))}
    return arms


ARMS = """plain
hand    hooks by hand that clamp
clip    gradsurg's Clip, without effects
tenth   the same, with effects at every tenth step
every   the same, with effects at every step
torch   clip_grad_norm_
global  gradsurg's ClipGlobalNorm"""
RATIOS = ("hand/plain", "clip/hand", "tenth/clip", "every/clip", "every/plain", "global/torch")


def measure(model: str, site: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds a step of each arm, one number a round."""
    with ExitStack() as stack:
        arms = {name: Arm(MODELS[model], stack) for name in arms_at(site)}
        for name, change in arms_at(site).items():
            change(arms[name])
        timed = {name: cpu_seconds(arm.step, STEPS) for name, arm in arms.items()}
        return in_turns(timed, rounds)


def table(rounds: int, threads: list[int], only: list[str]) -> str:
    """Return one line for each model, kind of site and number of threads."""
    lines = [["model", "sites", "threads", "plain, ms", *RATIOS]]
    for model in beginning(MODELS, only):
        for site in SITES:
            for count in threads:
                torch.set_num_threads(count)
                times = measure(model, site, rounds)
                row = [model, site, str(count), f"{1000 * median(times['plain']):.2f}"]
                for over, under in (name.split("/") for name in RATIOS):
                    row.append(ratio(times[over], times[under]) if over in times else "-")
                lines.append(row)
    note = f"ratios of medians (of minima in brackets), from {rounds} alternating rounds"
    return f"{ARMS}\n{note}\n{aligned(lines)}"
