"""FixedWeights: a weight for each task that never changes."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import Context, LossWeighting, Property, State
from gradsurg.fields import validated


@validated
class FixedWeights(LossWeighting):
    """The weighted sum of the gradients, one number a task in the order of the tasks.

    The weights are taken as they are, of any sign, and need not sum to one. Another number of
    tasks than of weights is an error. A NaN stays in its columns, also under a weight of 0.
    """

    weights: Annotated[tuple[float, ...], Field(min_length=1)]

    @property
    def num_tasks(self) -> int:
        return len(self.weights)

    @property
    def properties(self) -> frozenset[Property]:
        properties: set[Property] = {"linear_under_scaling", "homogeneous", "deterministic"}
        if len(set(self.weights)) == 1:
            properties |= {"permutation_invariant"}
        if min(self.weights) > 0:
            properties |= {"strongly_stationary"}
        if len(self.weights) == 1 and self.weights[0] >= 0:
            properties |= {"non_conflicting"}
        if len(self.weights) == 1 or not any(self.weights):
            properties |= {"scale_invariant"}
        if not any(self.weights):
            properties |= {"non_conflicting"}
        return frozenset(properties)

    def init(self, num_tasks: int) -> State:
        self._check(num_tasks)
        return {}

    def weigh(self, num_tasks: int, state: State, context: Context) -> tuple[Tensor, State]:
        self._check(num_tasks)
        return torch.tensor(self.weights, dtype=torch.float64), state

    def _check(self, num_tasks: int) -> None:
        if num_tasks != len(self.weights):
            raise ValueError(
                f"FixedWeights.weights: must be one for each task, found {len(self.weights)} "
                f"weights for {num_tasks} tasks"
            )
