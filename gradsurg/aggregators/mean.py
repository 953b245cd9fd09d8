"""Mean: the same weight for every task, which sum to one."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import (
    OF_GIVEN_WEIGHTS,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    LossWeighting,
)
from gradsurg.plugins.fields import validated


@validated
class Mean(LossWeighting):
    """The mean of the gradients: w = 1/T, as the mean of the losses has it."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return OF_GIVEN_WEIGHTS

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64), state
