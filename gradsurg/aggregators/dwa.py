"""DWA: larger weights for losses that decrease slowly."""

from dataclasses import KW_ONLY
from typing import Annotated

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

EPS = 1e-8


@validated
class DWA(LossWeighting):
    """Give larger weights to losses that decrease slowly: w_k = T softmax(r_k / temperature).

    `period` is the number of steps over which each loss is averaged. With the single losses of two
    steps (`period` 1) the noise between batches decides.

    r_k = L_k(t-1) / L_k(t-2), where L_k(t) is the mean loss of task k over period t. The weights
    are 1 in the first two periods.

    Dynamic weight averaging, Liu, Johns and Davison, CVPR 2019 (arXiv 1803.10704), equation 7, with
    their temperature of 2. Their period is an epoch: set `period` to the steps of an epoch for
    that.

    1e-8 is added to each mean loss, so zero is allowed. A negative loss is an error. A loss that is
    NaN or infinite leaves the weights and the state as they are. One task has weight 1. A change of
    the number of tasks is an error.
    """

    temperature: Annotated[float, Field(gt=0)] = 2.0
    _: KW_ONLY
    period: Annotated[int, Field(ge=1)] = 100

    tags = FIXED_WEIGHT_PROPERTIES

    def init(self, num_tasks: int) -> AggregatorState:
        means = {key: torch.ones(num_tasks, dtype=torch.float64) for key in ("older", "newer")}
        return {
            "mean": torch.zeros(num_tasks, dtype=torch.float64),
            **means,
            "calls": torch.zeros((), dtype=torch.int64),
            "periods": torch.zeros((), dtype=torch.int64),
        }

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        mean = state_of(self, state, "mean", num_tasks)
        losses = losses_of(self, context, num_tasks)
        weights = np.ones(num_tasks)
        if state["periods"] >= 2:
            with np.errstate(over="ignore"):
                rates = state["newer"].numpy() / state["older"].numpy() / self.temperature
            rates = np.minimum(rates, np.finfo(float).max)
            sizes = np.exp(rates - rates.max())
            weights = num_tasks * sizes / sizes.sum()
        if losses.isfinite().all():
            calls = state["calls"] + 1
            state = state | {"mean": mean + (losses - mean) / calls, "calls": calls}
        if state["calls"] == self.period:
            state = self.init(num_tasks) | {
                "older": state["newer"],
                "newer": state["mean"] + EPS,
                "periods": state["periods"] + 1,
            }
        return torch.from_numpy(weights), state
