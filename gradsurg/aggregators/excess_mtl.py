"""ExcessMTL: larger weights for tasks that are far from their optimum."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorState,
    state_of,
)
from gradsurg.aggregators.rows import at_least_float32, combine
from gradsurg.plugins.fields import validated

EPS = 1e-7


@validated
class ExcessMTL(Aggregator):
    """Give larger weights to tasks that are far from their optimum, by the estimated excess risk.

    Each w_i is multiplied by exp(lr e_i / e_i(1)) at each call, then the weights are normalized to
    a sum of T. Here e_i = g_iᵀ diag(S_i + 1e-7)^(-1/2) g_i estimates the excess risk of task i, how
    far its loss is from its optimum. S_i is the sum of the squares of its gradients so far, entry
    by entry, as Adagrad does. The divisor e_i(1) is the estimate of the first call, whose weights
    are 1.

    Algorithm 1 of He et al., ICML 2024 (arXiv 2402.02009), in the form that LibMTL has.

    The state has the size of all rows, T x P. A task whose first gradient is zero has e_i(1) = 1; a
    zero gradient does not change its weight before normalization. If an entry is NaN or infinite
    the result is the sum with the weights so far, and the state is kept. One task has weight 1. A
    change of the number of tasks or parameters is an error. Refused with a loss scale.
    """

    _: KW_ONLY
    lr: Annotated[float, Field(gt=0)] = 1e-2

    tags = frozenset({"permutation_invariant", "strongly_stationary", "deterministic"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {
            "logits": torch.zeros(num_tasks, dtype=torch.float64),
            "first": torch.zeros(num_tasks, dtype=torch.float64),
            "squares": torch.zeros(num_tasks, 0),
        }

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        logits = state_of(self, state, "logits", len(rows))
        wide = at_least_float32(rows)
        is_first = not state["squares"].numel()
        squares = torch.zeros_like(wide) if is_first else state["squares"]
        if squares.shape != rows.shape:
            raise ValueError(
                f"ExcessMTL: the state is of {squares.shape[1]} parameters, found "
                f"{rows.shape[1]}: their number must stay the same"
            )
        squares = squares.to(wide) + wide.square()
        excess = (wide.square() / (squares + EPS).sqrt()).sum(dim=1, dtype=torch.float64).cpu()
        if excess.isfinite().all():
            if is_first:
                state = state | {"first": torch.where(excess > 0, excess, 1.0)}
            else:
                logits = logits + self.lr * excess / state["first"]
                logits = logits - logits.max()
            state = state | {"logits": logits, "squares": squares}
        return combine(rows, len(rows) * logits.softmax(0)), state
