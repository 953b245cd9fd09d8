"""GradNorm: learned loss weights that balance the gradient norms of the tasks."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._adam import adam_step, init_moments
from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    losses_of,
    state_of,
)
from gradsurg.plugins.fields import validated

EPS = 1e-8
LEAST_SHARE = 1e-3
"""The smallest weight, as a fraction of the mean weight."""


@validated
class GradNorm(GramianAggregator):
    """Learn weights w that balance the norms w_i |g_i| of the gradients and the rates of training.

    `alpha` is the strength with which tasks that learn slowly are favoured; with 0 all norms become
    equal. `lr` is the step size of Adam on w, which does not depend on the scale of the gradients.

    Each call makes one gradient step on w to minimize sum_i |w_i n_i - m r_i^alpha|, with n_i =
    |g_i|. Here m is the mean of w_i n_i. The ratio r_i is the loss of task i over its first loss,
    divided by the mean of these ratios over the tasks. The target m r_i^alpha is treated as a
    constant. w starts at 1 and is normalized to a sum of T after each step. A call returns the
    weights learned before it. A weight stays above a thousandth of the mean weight.

    Chen et al., ICML 2018 (arXiv 1711.02257), equations 1 and 2 and algorithm 1; the default alpha,
    1.5, is the value of their NYUv2 experiments. Equation 1 weights the whole loss. Here w weights
    the gradients of the shared parameters, and parameters of one task, such as its head, get the
    unweighted gradient of that task.

    Losses must be >= 0; 1e-8 is added to them, so a first loss of zero is allowed. If a norm or a
    loss is NaN or infinite the weights and the state are kept. A zero gradient does not raise its
    weight. One task has weight 1. A change of the number of tasks is an error.
    """

    _: KW_ONLY
    alpha: Annotated[float, Field(ge=0)] = 1.5
    lr: Annotated[float, Field(gt=0)] = 0.025

    tags = FIXED_WEIGHT_PROPERTIES

    def init(self, num_tasks: int) -> AggregatorState:
        return {
            "weights": torch.ones(num_tasks, dtype=torch.float64),
            "first": torch.zeros(num_tasks, dtype=torch.float64),
            **init_moments(num_tasks),
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
        moved, after = adam_step(weights.numpy(), grad, state, self.lr)
        moved = np.maximum(moved, LEAST_SHARE)
        moved *= len(moved) / moved.sum()
        learnt = {"weights": torch.from_numpy(moved), "first": torch.from_numpy(first)}
        return weights, {**after, **learnt}
