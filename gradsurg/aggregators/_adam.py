"""Adam on a handful of numbers, with its moments in a state: for weights that are learnt."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import State

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def moments(num_tasks: int) -> State:
    """The moments before the first step."""
    return {
        "mean": torch.zeros(num_tasks, dtype=torch.float64),
        "square": torch.zeros(num_tasks, dtype=torch.float64),
        "steps": torch.zeros((), dtype=torch.float64),
    }


def stepped(value: Tensor, grad: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
    """The value after one step of `torch.optim.Adam` with its defaults, and the moments."""
    steps = state["steps"] + 1
    mean = BETA1 * state["mean"] + (1 - BETA1) * grad
    square = BETA2 * state["square"] + (1 - BETA2) * grad.square()
    size = (square / (1 - BETA2**steps)).sqrt() + EPS
    moved = value - lr * (mean / (1 - BETA1**steps)) / size
    return moved, {"mean": mean, "square": square, "steps": steps}
