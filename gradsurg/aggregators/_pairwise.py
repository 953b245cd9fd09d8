"""Gradients that are set against one another, one after the other: in lists, which for a few
tasks are faster than arrays.
"""

from math import isfinite, sqrt
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext

Order = Literal["random_per_task", "one_permutation", "fixed"]


def orders_of(order: Order, count: int, context: AggregatorContext) -> list[list[int]]:
    """For each of `count` tasks, all tasks in the order in which it meets them."""
    if count < 3:  # no order makes a difference: nothing is drawn
        order = "fixed"
    match order:
        case "random_per_task":
            draws = torch.rand(count, count, dtype=torch.float64, generator=context.generator())
            return draws.numpy().argsort(1).tolist()
        case "one_permutation":
            return [torch.randperm(count, generator=context.generator()).tolist()] * count
        case "fixed":
            return [list(range(count))] * count


def unpacked(gramian: Tensor) -> tuple[list[float] | None, list[list[float]]]:
    """The norms of the rows and their cosines, which are zero to a row of norm zero.

    No norms where a number of G is not finite.
    """
    rows = gramian.tolist()
    if not all(isfinite(sum(row)) for row in rows):
        return None, []
    norms = [sqrt(row[i]) for i, row in enumerate(rows)]
    inverse = [1 / norm if norm else 0.0 for norm in norms]
    return norms, [
        [entry * one * other for entry, other in zip(row, inverse, strict=True)]
        for row, one in zip(rows, inverse, strict=True)
    ]


def totals(parts: list[list[float]], norms: list[float]) -> Tensor:
    """The weights of the rows g_k, from what became of each u_i; a row of norm zero weighs 1."""
    sums = [
        sum(norm * part[k] for norm, part in zip(norms, parts, strict=True)) / length
        if length
        else 1.0
        for k, length in enumerate(norms)
    ]
    return torch.from_numpy(np.array(sums))


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
