"""Benchmark node resolution: a step of a 12-block transformer with and without selected nodes.

python -m scripts.bench nodes

Measures CPU time on one thread, which other processes disturb less than wall time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.models import transformer
from scripts.bench.turns import Arm, beginning, cpu_seconds, in_turns, of_pairs, ratio

KINDS: dict[str, Callable[[], Selector | None]] = {
    "plain": lambda: None,
    "plain again": lambda: None,
    "nothing attached to nodes": lambda: gs.Parameters("0.norm1.weight"),
    "Relu": lambda: gs.Nodes("Relu"),
    "attention": lambda: gs.Nodes("attention"),
    "Relu of one block": lambda: gs.Nodes("Relu", module="3.*"),
    "matmul": lambda: gs.Nodes("matmul"),
}


def measure(rounds: int, chosen: list[str]) -> dict[str, list[float]]:
    """Return the seconds a step of each arm, one number a round."""
    with ExitStack() as stack:
        make = partial(transformer, width=128, batch=8)
        arms = {name: Arm(make, stack) for name in chosen}
        for name, arm in arms.items():
            if (at := KINDS[name]()) is not None:
                arm.attach(gs.Identity(), at)
        return in_turns({name: cpu_seconds(arm.step) for name, arm in arms.items()}, rounds)


def table(rounds: int, only: list[str]) -> str:
    """Return one line for each selection whose name starts with one of `only`."""
    torch.set_num_threads(1)
    names = beginning(KINDS, only)
    times = measure(rounds, ["plain", *(name for name in names if name != "plain")])
    plain = times["plain"]
    head = ["nodes", "ms, median", "ms, min", "ratio of medians (of minima)", "of pairs"]
    rows = [
        [
            name,
            f"{1000 * median(own):.2f}",
            f"{1000 * min(own):.2f}",
            ratio(own, plain),
            f"{of_pairs(own, plain):.3f}",
        ]
        for name, own in times.items()
    ]
    return aligned([head, *rows])
