"""Builders shared by the tests of sites: a leaf, its gradient, call counts, small modules."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradsurg as gs


def point(*values: float) -> Tensor:
    """Return a leaf tensor, 1 by default."""
    return torch.tensor(values or (1.0,), requires_grad=True)


def grad_of(x: Tensor) -> list[Any]:
    assert x.grad is not None
    return x.grad.tolist()


def calls_of(live: gs.Live) -> dict[str, int]:
    """Return the number of gradients that passed at each site."""
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


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Tensor]
    count: int = 3


class Named(NamedTuple):
    left: Tensor
    right: list[Tensor]
