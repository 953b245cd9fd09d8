"""FAMO: weights that decrease all losses at equal rates, learned from the losses alone."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._adam import adam_step, init_moments
from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    LossWeighting,
    losses_of,
    state_of,
)
from gradsurg.aggregators.solvers import Array
from gradsurg.plugins.fields import validated

EPS = 1e-8


@validated
class FAMO(LossWeighting):
    """Decrease all losses at equal rates, with weights w_i = c z_i / l_i learned from the losses
    alone.

    z = softmax(xi) and c = 1 / sum(z_i / l_i). The logits xi start at 0. Adam with `lr` and weight
    decay `gamma` follows the gradient of sum z_i(xi) (log l_i(t) - log l_i(t+1)), so the weight of
    the slowest task grows.

    Liu et al., NeurIPS 2023 (arXiv 2306.03792), algorithm 1, equations 8 to 10, with the defaults
    of the authors' class `FAMO` (copies of it for benchmarks have gamma=1e-5). In the paper l(t+1)
    is the loss of the same batch after the step, at the cost of one more forward pass. Here it is
    the loss of the next call, so the noise between batches is included.

    The authors' class also clips the gradient of the shared parameters to a norm of 1 (`max_norm`).
    For this add a transform after the aggregator: `gs.Intervention(gs.ClipGlobalNorm(1.0),
    at=gs.Parameters("trunk.*", stage="step"))`, where `trunk` holds the shared parameters. On the
    command line this is `transform=clip_global_norm transform.clip_global_norm.max_norm=1
    site.stage=step 'site.pattern=trunk.*'`.

    1e-8 is added to each loss, so zero is allowed. A negative loss is an error: subtract its lower
    bound. If a loss is NaN or infinite all weights are NaN and the state is kept. One task has
    weight 1. A change of the number of tasks is an error.
    """

    _: KW_ONLY
    lr: Annotated[float, Field(gt=0)] = 0.025
    gamma: Annotated[float, Field(ge=0)] = 0.01

    tags = FIXED_WEIGHT_PROPERTIES

    def init(self, num_tasks: int) -> AggregatorState:
        return {
            "logits": torch.zeros(num_tasks, dtype=torch.float64),
            "losses": torch.zeros(num_tasks, dtype=torch.float64),
            "seen": torch.zeros((), dtype=torch.bool),
            **init_moments(num_tasks),
        }

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        logits = state_of(self, state, "logits", num_tasks).numpy()
        losses = losses_of(self, context, num_tasks).numpy() + EPS
        if not np.isfinite(losses).all():
            return torch.full((num_tasks,), torch.nan, dtype=torch.float64), state
        state = dict(state)
        if state["seen"]:
            shares = _softmax(logits)
            shrunk = np.log(state["losses"].numpy()) - np.log(losses)
            grad = shares * (shrunk - shares @ shrunk) + self.gamma * logits
            logits, after = adam_step(logits, grad, state, self.lr)
            state |= {**after, "logits": torch.from_numpy(logits)}
        weights = _softmax(logits) / losses
        state |= {"losses": torch.from_numpy(losses), "seen": torch.ones((), dtype=torch.bool)}
        return torch.from_numpy(weights / weights.sum()), state


def _softmax(logits: Array) -> Array:
    sizes = np.exp(logits - logits.max())
    return sizes / sizes.sum()
