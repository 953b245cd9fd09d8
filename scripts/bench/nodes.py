"""Benchmark node resolution: a step of a 12-block transformer with and without selected nodes.

python -m scripts.bench nodes

Measures CPU time on one thread, which other processes disturb less than wall time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.sites.places import Selector
from scripts.bench.turns import Arm, beginning, cpu_seconds, in_turns, of_pairs, ratio

BLOCKS, TOKENS, WIDTH, BATCH = 12, 16, 128, 8


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each with layer norm and residual path."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(self.norm2(x))


def network() -> tuple[nn.Module, Tensor]:
    blocks = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    return blocks, torch.randn(BATCH, TOKENS, WIDTH)


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
        arms = {name: Arm(network, stack) for name in chosen}
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
