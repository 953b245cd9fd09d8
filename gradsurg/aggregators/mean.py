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
    """Average the gradients: w = 1/T gives the gradient of the mean of the losses.

    Identical tasks, and one task, give that gradient; opposite ones give zero. A NaN stays in its
    columns.

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.Mean()(rows)
    tensor([0., 1.])
    """

    tags = FIXED_WEIGHT_PROPERTIES

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64), state
