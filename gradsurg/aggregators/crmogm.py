"""CRMOGM: the weights of another aggregator, smoothed over the steps."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
    state_of,
)
from gradsurg.plugins.fields import validated

INNER = "of/"  # start of the keys of the state of the inner aggregator


@validated
class CRMOGM(GramianAggregator):
    """Smooth the weights of the aggregator `of` over the steps: w_k = alpha w_(k-1) + (1 - alpha)
    w^_k.

    w^_k are the weights that `of` computes at step k, and the first w is w^_1. Averaging makes the
    weights nearly independent of the noise of one batch.

    Correlation-reduced multi-objective gradient manipulation, algorithm 1 of Zhou et al., NeurIPS
    2022 ("On the Convergence of Stochastic Multi-Objective Gradient Manipulation and Beyond"). In
    the paper alpha increases as the learning rate decreases; here it is constant.

    Zero, identical and opposite gradients are treated by `of`, and one task is unchanged if `of`
    leaves it unchanged. A NaN or infinity makes every weight NaN and keeps the state. Weights that
    are not unique, as happens for dependent gradients, may differ between orders of the tasks.
    """

    of: GramianAggregator
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        preserved: frozenset[AggregatorProperty] = frozenset(
            {"linear_under_scaling", "homogeneous", "deterministic"}
        )
        return self.of.properties & preserved

    @property
    def num_tasks(self) -> int | None:
        return self.of.num_tasks

    @property
    def least_tasks(self) -> int:
        return self.of.least_tasks

    def init(self, num_tasks: int) -> AggregatorState:
        inner = self.of.init(num_tasks)
        return {
            "weights": torch.zeros(num_tasks, dtype=torch.float64),
            "seen": torch.zeros((), dtype=torch.bool),
            **{f"{INNER}{key}": tensor for key, tensor in inner.items()},
        }

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        before = state_of(self, state, "weights", len(gramian))
        inner = {key[len(INNER) :]: state[key] for key in state if key.startswith(INNER)}
        weights, inner = self.of.update(gramian, inner, context)
        if not weights.isfinite().all():
            return weights, state
        if state["seen"]:
            weights = self.alpha * before + (1 - self.alpha) * weights
        after = {f"{INNER}{key}": tensor for key, tensor in inner.items()}
        seen = torch.ones((), dtype=torch.bool)
        return weights, {"weights": weights.clone(), "seen": seen, **after}
