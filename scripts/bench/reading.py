"""Benchmark reading the effects of a step: microseconds a site of `fetch` and `numbers`.

python -m scripts.bench reading [--rounds 60]
"""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from scripts.bench.turns import Arm, cpu_seconds

SITES = (8, 24, 60)
READERS: dict[str, Callable[[gs.Live], object]] = {
    "fetch": lambda live: live.effects.fetch(),
    "numbers": lambda live: live.effects.numbers(),
}


def layers(count: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count))), torch.randn(8, 16)


def micros(read: Callable[[gs.Live], object], count: int, rounds: int) -> str:
    """Return the microseconds a site of reading the effects of one step."""
    with ExitStack() as stack:
        arm = Arm(lambda: layers(count), stack)
        live = arm.attach(gs.Clip(0.01), gs.Parameters("*.weight"), every=1)
        seconds = cpu_seconds(lambda: read(live))
        times = []
        for _ in range(rounds):
            arm.step()
            times.append(seconds())
    return f"{1e6 * median(times) / count:.1f}"


def table(rounds: int) -> str:
    """Return one line for each way to read, with a column for each number of sites."""
    torch.set_num_threads(1)
    rows = [[name, *(micros(read, n, rounds) for n in SITES)] for name, read in READERS.items()]
    return aligned([["us a site", *(f"{count} sites" for count in SITES)], *rows])
