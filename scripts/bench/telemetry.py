"""Benchmark the telemetry of gradient conflicts, and the evaluation of all other aggregators.

python -m scripts.bench telemetry [--rounds 60]

Each number is for one measured step, fetched with 1 or 5 measured steps; by default the command
measures one step in ten and logs one in fifty. `alone` measures them back to back. In the other
columns each follows a step of UPGrad on a trunk of that width, which clears the caches as in a
run. `of a step` is the fraction of that step.
"""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle, product
from statistics import median
from time import perf_counter

import torch
from torch import nn

import gradsurg as gs
from gradsurg.aggregators.base import AggregatorContext
from gradsurg.effects.tables import aligned
from gradsurg.multitask.conflict import Conflicts, Measurement

TASKS, WIDTHS, BATCH = (2, 3, 8), (128, 1024), 100
WARM, DIFFERENT, TOGETHER = 20, 16, (1, 5)


def step_of(width: int, count: int, stack: ExitStack) -> Callable[[], object]:
    """Return a training step with so many heads, without measurements."""
    trunk = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(count))
    optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=1e-3)
    surgery = gs.Surgery(gs.Intervention(gs.UPGrad(), at=gs.SharedParameters()))
    model = nn.ModuleList([trunk, heads])
    live = stack.enter_context(surgery.attach(model, optimizer, effects_every=0))
    inputs, targets = torch.randn(BATCH, 64), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        features = trunk(inputs)
        losses = [nn.functional.cross_entropy(head(features), targets) for head in heads]
        live.backward(losses)
        optimizer.step()

    return step


def telemetry_of(
    count: int, together: int, step: Callable[[], object] | None = None
) -> Callable[[], float]:
    """Return the seconds of the telemetry of one of several steps that are fetched together.

    Each time for other gradients, with norms up to a factor of 10 apart, after a training `step`.
    """
    context = AggregatorContext(0, 0, "shared", tuple(map(str, range(count))), torch.rand(count))
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    sizes = torch.logspace(0, 1, count, dtype=torch.float64)
    rows = sizes[:, None] * torch.randn(DIFFERENT, count, 50, dtype=torch.float64)
    gramians = cycle(rows @ rows.mT)
    conflicts = Conflicts()

    def tell() -> None:
        gramian = next(gramians)
        falls = gramian @ weights
        norm = float(weights @ falls) ** 0.5
        conflicts.add(Measurement("mean", "mean", context, gramian, weights, falls, norm))

    def telemetry() -> float:
        taken = 0.0
        for _ in range(together):
            if step is not None:
                step()
            taken += _seconds(tell)
        return (taken + _seconds(conflicts.fetch)) / together

    return telemetry


def table(rounds: int) -> str:
    """Return one line for each number of tasks and steps, in ms and fractions of a step."""
    lines = [["tasks", "together", "alone, least", "median", *_heads()]]
    for count, together in product(TASKS, TOGETHER):
        torch.manual_seed(0)
        telemetry = telemetry_of(count, together)
        alone = [telemetry() for _ in range(WARM + rounds)][WARM:]
        line = [str(count), str(together), f"{1e3 * min(alone):.2f}", f"{1e3 * median(alone):.2f}"]
        for width in WIDTHS:
            with ExitStack() as stack:
                step = step_of(width, count, stack)
                steps = [_seconds(step) for _ in range(rounds)]
                telemetry = telemetry_of(count, together, step)
                after = [telemetry() for _ in range(rounds)]
            line += [f"{1e3 * min(after):.2f}", f"{1e3 * median(after):.2f}"]
            line.append(f"{median(after) / median(steps):.3f}")
        lines.append(line)
    threads = torch.get_num_threads()
    return f"milliseconds, {threads} threads, {rounds} rounds\n{aligned(lines)}"


def _heads() -> list[str]:
    return [text for width in WIDTHS for text in (f"after {width}, least", "median", "of a step")]


def _seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began
