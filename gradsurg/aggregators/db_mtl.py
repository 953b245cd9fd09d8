"""DBMTL: running means of the gradients of log losses, all given the largest norm."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    MEANS,
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    losses_of,
)
from gradsurg.plugins.fields import validated

EPS = 1e-8


@validated
class DBMTL(GramianAggregator):
    """d = Σ (max_j |y_j| / |y_i|) y_i, where y_i is a running mean of the gradient of log(L_i +
    1e-8).

    That gradient is g_i / (L_i + 1e-8), so tasks are balanced by both their losses and their
    gradients. y_i <- decay y_i + (1 - decay) g_i / (L_i + 1e-8), which begins with the first
    gradient.

    Equations 2 to 4 of Lin et al. 2023 ("Dual-Balancing for Multi-Task Learning", arXiv
    2308.12029), whose beta is `decay`. LibMTL's code differs: its mean starts at 0, so its first
    updates are shorter.

    The state has the size of all rows, T x P. A mean of zero has weight 1. With equal losses
    identical tasks give T times their mean y, opposite ones zero. A negative loss is an error. A
    NaN or infinity in a loss or a row makes every weight NaN and keeps the state. A change of the
    number of tasks or parameters is an error.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9

    tags = frozenset({"permutation_invariant", "deterministic"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {MEANS: torch.zeros(num_tasks, 0)}

    def mixing(self, num_tasks: int, state: AggregatorState, context: AggregatorContext) -> Tensor:
        losses = losses_of(self, context, num_tasks) + EPS
        kept = self.decay if state[MEANS].numel() else 0.0
        return torch.stack([torch.full_like(losses, kept), (1 - kept) / losses], dim=1)

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        norms = gramian.diagonal().sqrt()
        weights = torch.where(norms == 0, 1.0, norms.max() / norms)
        return weights, state
