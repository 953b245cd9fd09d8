"""Matrices of gradients of a given rank, with norms that differ by a given ratio."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

RATIOS = (1.0, 30.0, 1e3, 1e6)
COUNTS = (1, 2, 3, 8, 32)


def rows(count: int, rank: int, ratio: float, seed: int, lean: float = 0.0) -> Array:
    """J (count, 3 * count + 4): norms from 1 to `ratio` in a random order, leaning one way."""
    generator = np.random.default_rng([count, rank, int(ratio), seed])
    size = 3 * count + 4
    if rank < count:
        basis = generator.standard_normal((rank, size)) + lean
        made = generator.standard_normal((count, rank)) @ basis
    else:
        made = generator.standard_normal((count, size)) + lean
    norms = np.logspace(0, np.log10(ratio), count)
    generator.shuffle(norms)
    return made / np.linalg.norm(made, axis=1, keepdims=True) * norms[:, None]


def ranks(count: int) -> tuple[int, ...]:
    return tuple(sorted({count, max(1, count - 1), max(1, count // 2)}))


def gramian(matrix: Array) -> Tensor:
    return torch.from_numpy(matrix @ matrix.T)


def distance(result: Array, expected: Array) -> float:
    """The distance of the result from the expected one, relative to it."""
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
