"""What the numbers of a conflict take, and what every other aggregator would have done.

python scripts/bench.py telemetry [--rounds 60]

`alone` is one call after the other; the other columns are after a step of UPGrad on a trunk of that
width, which leaves little of it in the caches, as it is in a run. `of a step` is that share of it,
at a step that is measured: the runner measures one in fifty.
"""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from statistics import median
from time import perf_counter

import torch
from torch import nn

import gradsurg as gs
from gradsurg.aggregators.base import Context
from gradsurg.multitask.conflict import Conflicts, conflict_of, others_of
from gradsurg.tables import aligned

TASKS, WIDTHS, BATCH = (2, 3, 8), (128, 1024), 100
WARM, DIFFERENT = 20, 16


def step_of(width: int, count: int, stack: ExitStack) -> Callable[[], object]:
    """A training step of so many heads, in which nothing is measured."""
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


def telemetry_of(count: int) -> Callable[[], object]:
    """All that is said of one measured step, each time of other gradients, whose norms are up to 10
    times apart.
    """
    context = Context(0, 0, "shared", tuple(map(str, range(count))), torch.rand(count))
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    sizes = torch.logspace(0, 1, count, dtype=torch.float64)
    rows = sizes[:, None] * torch.randn(DIFFERENT, count, 50, dtype=torch.float64)
    steps = cycle([(gramian, gramian @ weights) for gramian in rows @ rows.mT])

    def telemetry() -> None:
        gramian, falls = next(steps)
        norm = float(weights @ falls) ** 0.5
        conflicts = Conflicts()
        found = conflict_of("mean", context, gramian, weights, falls, norm)
        conflicts.add(found, lambda: others_of("mean", context, gramian, falls, norm))
        conflicts.fetch()

    return telemetry


def table(rounds: int) -> str:
    """A line for each number of tasks, in milliseconds, and as shares of the step before it."""
    lines = [["tasks", "alone, least", "median", *_heads()]]
    for count in TASKS:
        torch.manual_seed(0)
        telemetry = telemetry_of(count)
        alone = sorted([_seconds(telemetry) for _ in range(WARM + rounds)][WARM:])
        line = [str(count), f"{1e3 * alone[0]:.2f}", f"{1e3 * median(alone):.2f}"]
        for width in WIDTHS:
            with ExitStack() as stack:
                step = step_of(width, count, stack)
                pairs = [(_seconds(step), _seconds(telemetry)) for _ in range(rounds)]
            steps, after = (sorted(times) for times in zip(*pairs, strict=True))
            line += [f"{1e3 * after[0]:.2f}", f"{1e3 * median(after):.2f}"]
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
