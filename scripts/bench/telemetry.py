"""Benchmark measuring the conflicts of several losses, with the weights of all other aggregators.

python -m scripts.bench telemetry [--rounds 60]

A row is the milliseconds of one measured step, for numbers that are fetched at each or at every
fifth one. By default the command measures one step in ten and logs one in fifty.
"""

from itertools import cycle, product
from statistics import median

import torch

from gradsurg.aggregators.base import AggregatorContext
from gradsurg.effects.tables import aligned
from gradsurg.multitask.conflict import Conflicts, Measurement
from scripts.bench.turns import cpu_seconds

TASKS, TOGETHER, WARM, DIFFERENT = (2, 3, 8), (1, 5), 20, 16


def seconds(count: int, together: int, rounds: int) -> list[float]:
    """Return the seconds of a measured step for several tasks, of which `together` are fetched."""
    context = AggregatorContext(0, 0, "shared", tuple(map(str, range(count))), torch.rand(count))
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    sizes = torch.logspace(0, 1, count, dtype=torch.float64)  # the norms differ by a factor of 10
    rows = sizes[:, None] * torch.randn(DIFFERENT, count, 50, dtype=torch.float64)
    gramians = cycle(rows @ rows.mT)
    conflicts = Conflicts()

    def measured() -> None:
        for _ in range(together):
            gramian = next(gramians)
            falls = gramian @ weights
            norm = float(weights @ falls) ** 0.5
            conflicts.add(Measurement("mean", "mean", context, gramian, weights, falls, norm))
        conflicts.fetch()

    timed = cpu_seconds(measured)
    return [timed() / together for _ in range(WARM + rounds)][WARM:]


def table(rounds: int) -> str:
    """Return one line for each number of tasks and of measured steps that are fetched together."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = [["tasks", "together", "ms, median", "least"]]
    for count, together in product(TASKS, TOGETHER):
        times = seconds(count, together, rounds)
        milliseconds = [f"{1e3 * number:.2f}" for number in (median(times), min(times))]
        lines.append([str(count), str(together), *milliseconds])
    return aligned(lines)
