"""Shared by PCGrad and GradVac, which project gradients on one another in turn.

Plain lists: for a few tasks they are faster than arrays.
"""

from math import isfinite, sqrt
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext

Order = Literal["random_per_task", "one_permutation", "fixed"]


def draw_orders(order: Order, count: int, context: AggregatorContext) -> list[list[int]]:
    """Return, for each of `count` tasks, the order in which it meets all tasks."""
    if count < 3:  # the order has no effect, so no random numbers are drawn
        order = "fixed"
    match order:
        case "random_per_task":
            draws = torch.rand(count, count, dtype=torch.float64, generator=context.generator())
            return draws.numpy().argsort(1).tolist()
        case "one_permutation":
            return [torch.randperm(count, generator=context.generator()).tolist()] * count
        case "fixed":
            return [list(range(count))] * count


def norms_and_cosines(gramian: Tensor) -> tuple[list[float] | None, list[list[float]]]:
    """Return the norms of the rows and the matrix of their cosines (0 for a row of norm zero).

    The norms are None if G is not finite.
    """
    rows = gramian.tolist()
    if not all(isfinite(sum(row)) for row in rows):
        return None, []
    norms = [sqrt(row[i]) for i, row in enumerate(rows)]
    inverse = [1 / norm if norm else 0.0 for norm in norms]
    return norms, [
        [entry * left * right for entry, right in zip(row, inverse, strict=True)]
        for row, left in zip(rows, inverse, strict=True)
    ]


def row_weights(parts: list[list[float]], norms: list[float]) -> Tensor:
    """Return the weights (T,) of the rows g_k.

    `parts[i][k]` is the coefficient of u_k = g_k / |g_k| in task i. A row of norm zero has weight
    1.
    """
    sums = [
        sum(norm * part[k] for norm, part in zip(norms, parts, strict=True)) / length
        if length
        else 1.0
        for k, length in enumerate(norms)
    ]
    return torch.from_numpy(np.array(sums))


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
