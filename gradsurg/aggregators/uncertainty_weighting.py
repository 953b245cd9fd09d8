"""UncertaintyWeighting: divide each loss by the learned variance of its task."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    LossWeighting,
    losses_of,
    state_of,
)
from gradsurg.plugins.fields import validated


@validated
class UncertaintyWeighting(LossWeighting):
    """Divide each loss by the learned variance of its task: w_i = exp(-s_i) / 2.

    `likelihood` is the distribution of the errors. `softmax`, for cross-entropy losses, drops the
    1/2: w_i = exp(-s_i). `laplace`, for absolute errors, has the same w_i and follows w_i l_i +
    s_i, so that at rest every w_i l_i is 1.

    The learned log variance of task i is s_i = log sigma_i^2. It starts at 0 and follows the
    gradient of sum_i w_i l_i + s_i / 2 by plain steps of `lr` after each call; at rest w_i = 1 / (2
    l_i).

    Kendall, Gal and Cipolla, CVPR 2018 (arXiv 1705.07115), equations 7 and 10. `laplace` is IMTL-L
    (Liu et al., ICLR 2021, "Towards Impartial Multi-task Learning", the loss part), whose s is
    -s_i; `aggregator=imtl_l` selects it. In the papers the network's optimizer trains s; here s has
    its own gradient descent.

    Losses must be >= 0: for negative ones s would decrease without bound. A loss far above 1 makes
    long steps of s: choose a smaller `lr`. If a loss is NaN or infinite the weights and the state
    are kept. A change of the number of tasks is an error.
    """

    _: KW_ONLY
    lr: Annotated[float, Field(gt=0)] = 2.5e-3
    likelihood: Literal["gaussian", "softmax", "laplace"] = "gaussian"

    tags = FIXED_WEIGHT_PROPERTIES

    def init(self, num_tasks: int) -> AggregatorState:
        return {"log_variances": torch.zeros(num_tasks, dtype=torch.float64)}

    @np.errstate(all="ignore")
    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        logs = state_of(self, state, "log_variances", num_tasks).numpy()
        losses = losses_of(self, context, num_tasks).numpy()
        match self.likelihood:
            case "gaussian":
                share, slope = 0.5, 0.5
            case "softmax":
                share, slope = 1.0, 0.5
            case "laplace":
                share, slope = 1.0, 1.0
        weights = share * np.exp(-logs)
        if np.isfinite(losses).all():
            logs = logs - self.lr * (slope - weights * losses)
        return torch.from_numpy(weights), {"log_variances": torch.from_numpy(logs)}
