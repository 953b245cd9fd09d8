"""Random: random weights, drawn at every step."""

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor

from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorState,
    LossWeighting,
)
from gradsurg.plugins.fields import validated


@validated
class Random(LossWeighting):
    """Weight the gradients at random: w = softmax(z), with z ~ N(0, I) drawn once per step.

    `draw="dirichlet"` draws the weights uniformly from the simplex, w ~ Dirichlet(1, ..., 1). Both
    kinds sum to one and have mean 1/T.

    Random loss weighting (RLW) of Lin et al., TMLR 2022 (arXiv 2111.10603), equation 2.

    The draw depends on seed, group and step, and without an optimizer also on the number of the
    call, so runs are repeatable. Identical tasks give that gradient, but opposite ones rarely
    cancel. One task has weight 1, a NaN stays in its columns.
    """

    _: KW_ONLY
    draw: Literal["normal", "dirichlet"] = "normal"

    tags = frozenset({"linear_under_scaling", "homogeneous", "strongly_stationary"})

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        drawn = torch.empty(num_tasks, dtype=torch.float64)
        generator = context.generator()
        match self.draw:
            case "normal":
                weights = drawn.normal_(generator=generator).softmax(0)
            case "dirichlet":
                # Exponential variates divided by their sum are uniform on the simplex.
                drawn.exponential_(generator=generator)
                weights = drawn / drawn.sum()
        return weights, state
