"""Benchmark the one-pass sums of effects: a pair of gradients beside `torch.clamp` of one.

python scripts/bench.py kernel [--rounds 60]
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import torch

from gradsurg.effects.sums import NUM_SUMS, add_on_cpu, eager_sums
from gradsurg.effects.tables import aligned


def table(rounds: int) -> str:
    """Return a line for each size: CPU times of one thread, and ratios to that of the clamp."""
    torch.set_num_threads(1)
    rows = [["float32 entries", "clamp, us", "kernel, us", "eager, us", "kernel <= 2", "eager"]]
    for size in (100_000, 1_000_000):
        before = torch.randn(size)
        after, sums = before.clamp(-1, 1), torch.zeros(1, NUM_SUMS, dtype=torch.float64)
        functions: list[Callable[[], object]] = [
            partial(before.clamp, -1, 1),
            partial(add_on_cpu, before, after, sums, 0),
            partial(eager_sums, before, after),
        ]
        times: list[list[float]] = [[] for _ in functions]
        for _ in range(rounds + 1):  # the first one compiles the kernel
            for function, own in zip(functions, times, strict=True):
                began = process_time()
                function()
                own.append(1e6 * (process_time() - began))
        clamp, kernel, eager = (median(own[1:]) for own in times)
        numbers = [f"{number:.0f}" for number in (clamp, kernel, eager)]
        rows.append([f"{size:,}", *numbers, f"{kernel / clamp:.2f}", f"{eager / clamp:.2f}"])
    return aligned(rows)
