"""NashMTL: the Nash bargaining solution of the tasks."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
)
from gradsurg.aggregators.solvers import Array, bargain, limit_norm, solve_weights
from gradsurg.plugins.fields import validated


@validated
class NashMTL(GramianAggregator):
    """w > 0 with G w = 1 / w, entry by entry: the Nash bargaining solution in a ball.

    `normalize` divides G by its Frobenius norm first, which multiplies the weights by sqrt(|G|);
    without it |d| is always sqrt(T). Then |d| is limited to `max_norm`, with 0 for no limit.
    Weights are reused for `update_weights_every` calls. All three are in the official code.

    Solved to machine precision by Newton's method. The direction does not depend on the norms of
    the gradients.

    Claim 3.1 and algorithm 1 of Navon et al., ICML 2022 (arXiv 2202.01017).

    If no direction improves every task (0 is in the convex hull of the gradients) there is no
    solution, and the weights are zero. Opposite tasks are such a case. Zero gradients have weight
    zero. Identical tasks, and one task, give the direction of their gradient. A NaN or infinity
    makes every weight NaN, and keeps the state.

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.NashMTL()(rows)
    tensor([0.5257, 0.8507])
    """

    _: KW_ONLY
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    normalize: bool = True
    update_weights_every: Annotated[int, Field(ge=1)] = 1

    tags = frozenset({"deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        each_step = self.update_weights_every == 1
        return {
            "non_conflicting": each_step,
            "permutation_invariant": each_step,
            "scale_invariant": each_step,
            "homogeneous": each_step and self.normalize and not self.max_norm,
        }

    def init(self, num_tasks: int) -> AggregatorState:
        if self.update_weights_every == 1:
            return {}
        return {
            "weights": torch.zeros(num_tasks, dtype=torch.float64),
            "age": torch.zeros((), dtype=torch.int64),
        }

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        if state and state["age"] % self.update_weights_every:
            weights = state["weights"]
        else:
            weights = solve_weights(gramian, _bargain_unit)
            if self.normalize:
                weights = torch.from_numpy(weights.numpy() * _root_of_norm(gramian.numpy()))
        used = limit_norm(weights, gramian, self.max_norm)
        if state and used.isfinite().all():
            state = {"weights": weights, "age": state["age"] + 1}
        return used, state


def _root_of_norm(matrix: Array) -> float:
    """Return the square root of the Frobenius norm, computed without overflow or underflow."""
    largest = np.abs(matrix).max()
    if not 0 < largest < np.inf:
        return np.sqrt(largest)
    return np.sqrt(largest) * np.sqrt(np.linalg.norm(matrix / largest))


def _bargain_unit(cosines: Array, norms: Array) -> Array:
    return bargain(cosines, norms, 1.0)
