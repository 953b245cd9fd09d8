"""The gradients that aggregators are checked on: easy ones, small ones, and those that hurt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

PAST = 2
"""Calls before the one that is looked at, for aggregators that remember."""

KNOWN = (
    [[1.0]],
    [[0.0, 0.0]],
    [[1.0, 2.0], [3.0, -4.0]],
    [[1.0, 0.0], [0.0, 1.0]],
    [[1.0, 0.0], [-1.0, 0.0]],  # opposite
    [[1.0, 0.0], [-3.0, 0.0]],
    [[1.0, 2.0], [1.0, 2.0]],  # identical
    [[1.0, 2.0], [0.0, 0.0]],  # one is at rest
    [[0.0, 0.0], [1.0, 2.0]],
    [[1.0, 0.1], [-1.0, 0.1]],  # nearly opposite
    [[30.0, 0.0], [-1.0, 0.1]],
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -1.0, 0.0]],
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    [[2.0, 0.0], [-0.5, 1.0], [-1.5, -1.0]],  # they sum to zero
    [[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],  # dependent
)


@dataclass(frozen=True)
class Example:
    """Rows in float64, those of the calls before, the losses of each call, and a name."""

    name: str
    rows: Tensor
    past: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]

    def scaled(self, factors: Tensor | float) -> "Example":
        """Only the rows at hand, times a number or one for each row."""
        return replace(self, rows=torch.as_tensor(factors).reshape(-1, 1) * self.rows)

    def permuted(self, order: Tensor) -> "Example":
        """The tasks in another order, now and before."""
        return Example(
            f"{self.name} in the order {order.tolist()}",
            self.rows[order],
            tuple(rows[order] for rows in self.past),
            tuple(losses[order] for losses in self.losses),
        )


def examples(num_tasks: Sequence[int], count: int) -> Iterator[Example]:
    """The known matrices of so many tasks, then random ones, the small ones first."""
    for rows in KNOWN:
        if len(rows) in num_tasks:
            yield _example(str(rows), torch.tensor(rows, dtype=torch.float64), seed=0)
    for index in range(count):
        choice = Random(index)
        tasks = num_tasks[index % len(num_tasks)]
        size = choice.choice([1, 2, 3, 5, 20] if index < count // 2 else [5, 20, 60])
        rank = choice.randint(1, min(tasks, size))
        rows = normal(tasks, size, rank, index)
        name = f"normal rows {tasks} x {size} of rank {rank}, seed {index}"
        if index % 3 == 1:
            rows, name = mixed(rows, index), f"{name}, row scales 1e-3 to 1e3"
        if index % 5 == 4:
            rows, name = stationary(rows, index), f"{name}, made to cancel"
        yield _example(name, rows, index)


def not_stationary(num_tasks: Sequence[int], count: int) -> Iterator[Example]:
    """Rows among which a direction helps a task and harms none: J = u v' + N, N v = 0, u >= 0."""
    for example in examples(num_tasks, 0):
        if any(_helps(example.rows, direction) for direction in (1.0, -1.0)):
            yield example
    for index in range(count):
        tasks = num_tasks[index % len(num_tasks)]
        size = (2, 3, 5, 20)[index // len(num_tasks) % 4]
        generator = torch.Generator().manual_seed(1000 + index)
        v = _normal((size,), generator)
        v /= v.norm()
        rest = _normal((tasks, size), generator) * (0.0, 1.0, 10.0)[index % 3]
        if index % 2 and tasks > 2:
            rest[-1] = -rest[-2]
        rest -= (rest @ v)[:, None] * v
        gains = 0.1 + torch.rand(tasks, generator=generator, dtype=torch.float64)
        if tasks > 1:
            # All tasks gain, or half of them, or one.
            gains[(tasks, -(-tasks // 2), 1)[index // 3 % 3] :] = 0
        name = f"rows {tasks} x {size} with a direction that harms none, seed {index}"
        yield _example(name, gains[:, None] * v + rest, index)


def normal(tasks: int, size: int, rank: int, seed: int) -> Tensor:
    """Random rows of a given rank, in float64."""
    generator = torch.Generator().manual_seed(seed)
    left, right = _normal((tasks, rank), generator), _normal((rank, size), generator)
    return left @ right / rank**0.5


def mixed(rows: Tensor, seed: int) -> Tensor:
    """The rows times factors between 1e-3 and 1e3."""
    generator = torch.Generator().manual_seed(seed)
    powers = 6 * torch.rand(len(rows), generator=generator, dtype=torch.float64) - 3
    return 10 ** powers[:, None] * rows


def stationary(rows: Tensor, seed: int) -> Tensor:
    """The rows with the last one changed, so that positive weights cancel them all."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.1 + torch.rand(len(rows) - 1, 1, generator=generator, dtype=torch.float64)
    return torch.cat([rows[:-1], -(weights * rows[:-1]).sum(0, keepdim=True)])


def losses_for(num_tasks: int, seed: int) -> Tensor:
    """Positive losses."""
    generator = torch.Generator().manual_seed(seed)
    return 0.1 + 3 * torch.rand(num_tasks, generator=generator, dtype=torch.float64)


def names(num_tasks: int) -> tuple[str, ...]:
    """Names of so many tasks."""
    return tuple(f"task{index}" for index in range(num_tasks))


def _example(name: str, rows: Tensor, seed: int) -> Example:
    tasks, size = rows.shape
    past = tuple(normal(tasks, size, min(tasks, size), seed + 100 + call) for call in range(PAST))
    losses = tuple(losses_for(tasks, seed + call) for call in range(PAST + 1))
    return Example(name, rows, past, losses)


def _helps(rows: Tensor, sign: float) -> bool:
    """Whether one of a few simple directions helps a task and harms none."""
    size = rows.shape[1]
    simple = [sign * torch.eye(size, dtype=rows.dtype)[axis] for axis in range(size)]
    products = [rows @ direction for direction in simple]
    return any(bool((one >= 0).all() and (one > 0).any()) for one in products)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
