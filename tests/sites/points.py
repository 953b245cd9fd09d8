"""What the tests of sites share: a leaf, its gradient, counts of calls, a module called twice."""

from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs


def point(*values: float) -> Tensor:
    """A leaf: 1 unless other values are given."""
    return torch.tensor(values or (1.0,), requires_grad=True)


def grad_of(x: Tensor) -> list[Any]:
    assert x.grad is not None
    return x.grad.tolist()


def calls_of(live: gs.Live) -> dict[str, int]:
    """How many gradients passed at each site."""
    return {entry.site: entry.calls for entry in live.ledger}


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Shared(nn.Module):
    """One module called twice, then a sum: d/dx = 4, d/d(first call) = 2, d/d(second) = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Double()

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(x)).sum()
