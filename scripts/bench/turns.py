"""Time several ways of doing the same in turns, in one process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from statistics import median
from time import process_time
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform

Result = TypeVar("Result")
BATCHES = 16


def in_turns(
    ways: Mapping[str, Callable[[], Result]], rounds: int, warm: int = 3
) -> dict[str, list[Result]]:
    """Return the results of each way, one a round, after rounds that warm it up.

    Every other round goes backwards, so that no way always follows the same one.
    """
    results: dict[str, list[Result]] = {name: [] for name in ways}
    for turn in range(warm + rounds):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            result = ways[name]()
            if turn >= warm:
                results[name].append(result)
    return results


def cpu_seconds(work: Callable[[], object], steps: int = 1) -> Callable[[], float]:
    """Return a function that does the work and returns the CPU time of the process for it."""

    def seconds() -> float:
        began = process_time()
        for _ in range(steps):
            work()
        return (process_time() - began) / steps

    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the ratio of the medians and, in brackets, of the minima."""
    return f"{median(over) / median(under):.3f} ({min(over) / min(under):.3f})"


def of_pairs(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return median(a / b for a, b in zip(over, under, strict=True))


def beginning(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """Return the names that begin with one of `only`."""
    return [name for name in names if name.startswith(tuple(only))]


def _like(batch: Tensor) -> Tensor:
    """Return another batch: random numbers, or the same tokens in another order."""
    if not batch.is_floating_point():
        return batch[torch.randperm(len(batch))]
    return torch.randn_like(batch).requires_grad_(batch.requires_grad)


class Arm:
    """One way of training a model; all arms begin with the same weights."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make()
        self._batches = cycle([self.inputs, *(_like(self.inputs) for _ in range(BATCHES - 1))])
        self.call: Callable[..., Any] = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.before_step: Callable[[], object] = lambda: None
        self.stack = stack

    def attach(self, transform: Transform, at: Selector | None = None, every: int = 0) -> gs.Live:
        """Attach a transform until the stack is closed."""
        item = gs.Intervention(transform, at=at) if at else gs.Intervention(transform)
        attached = gs.Surgery(item).attach(self.model, self.optimizer, effects_every=every)
        return self.stack.enter_context(attached)

    def loss(self) -> Tensor:
        return self.call(self.inputs).square().mean()

    def next_batch(self) -> None:
        self.inputs = next(self._batches)

    def step(self) -> None:
        """Train on the next of a few batches."""
        self.next_batch()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.before_step()
        self.optimizer.step()
