"""GradNorm: loss weights that pull the norms of the tasks' gradients together."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._adam import moments, stepped
from gradsurg.aggregators.base import (
    OF_GIVEN_WEIGHTS,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
    losses_of,
    state_of,
)
from gradsurg.plugins.fields import validated

EPS = 1e-8
LEAST = 1e-3
"""The least share of the mean weight that a task keeps."""


@validated
class GradNorm(GramianAggregator):
    """Weights w that follow the gradient of sum_i |w_i n_i - m r_i^alpha|, n_i = |g_i|.

    m is the mean of w_i n_i, r_i the loss of task i over its first loss, over the mean of these
    ratios; the target m r_i^alpha counts as a constant. w starts at 1 and sums to T after each
    step. Chen et al., ICML 2018 (arXiv 1711.02257), equations 1 and 2 and algorithm 1; alpha 1.5
    is that of their NYUv2 experiments. The weights of a call are those learnt before it. Equation 1
    weighs the whole loss; here w weighs the gradients of the shared parameters, and what one task
    alone reaches, as its head, gets the gradient of that task unweighted.

    The step is Adam's with `lr`, which the scale of the gradients does not change, and a weight
    stays above a thousandth of the mean weight. Losses must be >= 0, and have 1e-8 added, so that a
    first loss of zero is allowed. With a norm or a loss that is NaN or infinite nothing is
    remembered of that call. A zero gradient gains nothing. One task has weight 1. Another number
    of tasks is an error.
    """

    _: KW_ONLY
    alpha: Annotated[float, Field(ge=0)] = 1.5
    lr: Annotated[float, Field(gt=0)] = 0.025

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return OF_GIVEN_WEIGHTS

    def init(self, num_tasks: int) -> AggregatorState:
        return {
            "weights": torch.ones(num_tasks, dtype=torch.float64),
            "first": torch.zeros(num_tasks, dtype=torch.float64),
            **moments(num_tasks),
        }

    @np.errstate(all="ignore")
    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        weights = state_of(self, state, "weights", len(gramian))
        losses = losses_of(self, context, len(gramian)).numpy() + EPS
        norms = np.sqrt(np.maximum(gramian.numpy().diagonal(), 0.0))
        if not np.isfinite(norms + losses).all():
            return weights, state
        first = state["first"].numpy() if state["steps"] else losses
        sizes = weights.numpy() * norms
        rates = losses / first
        targets = sizes.mean() * (rates / rates.mean()) ** self.alpha
        grad = norms * np.sign(sizes - targets)
        moved, after = stepped(weights.numpy(), grad, state, self.lr)
        moved = np.maximum(moved, LEAST)
        moved *= len(moved) / moved.sum()
        learnt = {"weights": torch.from_numpy(moved), "first": torch.from_numpy(first)}
        return weights, {**after, **learnt}
