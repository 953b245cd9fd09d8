"""Mean: the same weight 1/T for every task."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    LossWeighting,
)
from gradsurg.plugins.fields import validated


@validated
class Mean(LossWeighting):
    """The mean of the gradients, w = 1/T: the gradient of the mean of the losses.

    One task is unchanged, a NaN stays in its columns.
    """

    tags = FIXED_WEIGHT_PROPERTIES

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64), state
