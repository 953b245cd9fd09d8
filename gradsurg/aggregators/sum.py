"""Sum: every task's gradient as it is, added up."""

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
class Sum(LossWeighting):
    """The sum of the gradients: w = 1, as the sum of the losses has it.

    One task is unchanged, a NaN stays in its columns.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return OF_GIVEN_WEIGHTS

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.ones(num_tasks, dtype=torch.float64), state
