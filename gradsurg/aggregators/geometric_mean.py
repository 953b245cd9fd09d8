"""GeometricMean: follow the geometric mean of the losses."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    LossWeighting,
    losses_of,
)
from gradsurg.plugins.fields import validated

EPS = 1e-8


@validated
class GeometricMean(LossWeighting):
    """Follow the gradient of the geometric mean of the losses, M = (Π (L_i + 1e-8))^(1/T).

    The weights are M / (T (L_i + 1e-8)). A factor on one loss scales the update, and does not
    change its direction.

    Equation 2 of Chennupati et al., CVPR workshops 2019 (arXiv 1904.08492).

    A loss of zero takes nearly all the weight. A negative loss is an error; a NaN or infinity makes
    every weight NaN. One task has weight 1.
    """

    tags = FIXED_WEIGHT_PROPERTIES

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        logs = (losses_of(self, context, num_tasks) + EPS).log()
        weights = (logs.mean() - logs).exp() / num_tasks
        return weights if bool(logs.isfinite().all()) else weights * torch.nan, state
