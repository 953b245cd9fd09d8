"""Sum: add up the gradients of the tasks."""

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
class Sum(LossWeighting):
    """Add up the gradients: w = 1 gives the gradient of the sum of the losses.

    Opposite gradients cancel, one task is unchanged, a NaN stays in its columns.
    """

    tags = FIXED_WEIGHT_PROPERTIES

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.ones(num_tasks, dtype=torch.float64), state
