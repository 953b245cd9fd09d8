"""MoCo: the minimum-norm combination of running means of the gradients."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    MEANS,
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    state_of,
)
from gradsurg.aggregators.solvers import project_on_simplex
from gradsurg.plugins.fields import validated


@validated
class MoCo(GramianAggregator):
    """d = Yᵀ w, where w follows the minimum-norm combination of running means Y of the gradients J.

    At call t = 1, 2 and so on, y_i <- y_i + b (g_i - y_i), then w <- Π(w - c (Y Yᵀ + rho I) w).
    Here b = beta / t^decay, c = gamma / t^decay, and Π is the Euclidean projection on the simplex.
    At first Y is 0 and w is 1 / T each. The means take out the bias that the noise of a batch gives
    to w.

    Algorithm 1 of Fernando et al., ICLR 2023 ("Mitigating Gradient Bias in Multi-objective
    Learning"), with the defaults of LibMTL. LibMTL's code differs: it takes a softmax for Π, and
    normalized gradients times the losses, L_i g_i / |g_i|, in place of g_i.

    The state has the size of all rows, T x P. As Y begins at 0 the first updates are short, also
    for one task. Opposite tasks give zero. A NaN or infinity makes every weight NaN and keeps the
    state. A change of the number of tasks or parameters is an error.
    """

    beta: Annotated[float, Field(gt=0, le=1)] = 0.5
    _: KW_ONLY
    gamma: Annotated[float, Field(gt=0)] = 0.1
    rho: Annotated[float, Field(ge=0)] = 0.0
    decay: Annotated[float, Field(ge=0)] = 0.5

    tags = frozenset({"permutation_invariant", "deterministic"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {
            MEANS: torch.zeros(num_tasks, 0),
            "weights": torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64),
            "calls": torch.zeros((), dtype=torch.int64),
        }

    def mixing(self, num_tasks: int, state: AggregatorState, context: AggregatorContext) -> Tensor:
        new = torch.full((num_tasks,), self._share(self.beta, state), dtype=torch.float64)
        return torch.stack([1 - new, new], dim=1)

    @np.errstate(all="ignore")
    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        w, matrix = state_of(self, state, "weights", len(gramian)).numpy(), gramian.numpy()
        if not np.isfinite(matrix).all():
            return torch.full((len(w),), torch.nan, dtype=torch.float64), state
        slope = matrix @ w + self.rho * w
        w = project_on_simplex(w - self._share(self.gamma, state) * slope)
        weights = torch.from_numpy(w)
        return weights, state | {"weights": weights, "calls": state["calls"] + 1}

    def _share(self, first: float, state: AggregatorState) -> float:
        return first / float(state["calls"] + 1) ** self.decay
