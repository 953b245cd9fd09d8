"""Benchmark the one-pass sums of effects: a pair of gradients beside `torch.clamp` of one.

python -m scripts.bench kernel [--rounds 60]
"""

from functools import partial
from statistics import median

import torch

from gradsurg.effects.sums import NUM_SUMS, add_on_cpu, eager_sums
from gradsurg.effects.tables import aligned
from scripts.bench.turns import cpu_seconds, in_turns


def table(rounds: int) -> str:
    """Return a line for each size: CPU times of one thread, and ratios to the clamp's."""
    torch.set_num_threads(1)
    rows = [["float32 entries", "clamp, us", "kernel, us", "eager, us", "kernel <= 2", "eager"]]
    for size in (100_000, 1_000_000):
        before = torch.randn(size)
        after, sums = before.clamp(-1, 1), torch.zeros(1, NUM_SUMS, dtype=torch.float64)
        ways = {
            "clamp": cpu_seconds(partial(before.clamp, -1, 1)),
            "kernel": cpu_seconds(partial(add_on_cpu, before, after, sums, 0)),
            "eager": cpu_seconds(partial(eager_sums, before, after)),
        }
        times = in_turns(ways, rounds, warm=1)  # the first round compiles the kernel
        clamp, kernel, eager = (1e6 * median(own) for own in times.values())
        numbers = [f"{number:.0f}" for number in (clamp, kernel, eager)]
        rows.append([f"{size:,}", *numbers, f"{kernel / clamp:.2f}", f"{eager / clamp:.2f}"])
    return aligned(rows)
