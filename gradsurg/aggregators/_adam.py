"""Adam on one number a task, for aggregators that learn their weights."""

import numpy as np
import torch

from gradsurg.aggregators.base import AggregatorState
from gradsurg.aggregators.solvers import Array

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def init_moments(num_tasks: int) -> AggregatorState:
    """Return the moments before the first step."""
    return {
        "mean": torch.zeros(num_tasks, dtype=torch.float64),
        "square": torch.zeros(num_tasks, dtype=torch.float64),
        "steps": torch.zeros((), dtype=torch.float64),
    }


def adam_step(
    value: Array, grad: Array, state: AggregatorState, lr: float
) -> tuple[Array, AggregatorState]:
    """Return the value after one step of `torch.optim.Adam` with default betas and eps, and the
    next moments.
    """
    steps = float(state["steps"]) + 1
    mean = BETA1 * state["mean"].numpy() + (1 - BETA1) * grad
    square = BETA2 * state["square"].numpy() + (1 - BETA2) * grad**2
    size = np.sqrt(square / (1 - BETA2**steps)) + EPS
    moved = value - lr * (mean / (1 - BETA1**steps)) / size
    return moved, {
        "mean": torch.from_numpy(mean),
        "square": torch.from_numpy(square),
        "steps": torch.tensor(steps, dtype=torch.float64),
    }
