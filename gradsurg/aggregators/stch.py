"""STCH: follow a smooth maximum of the weighted losses."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    LossWeighting,
    losses_of,
)
from gradsurg.plugins.fields import FieldError, validated


@validated
class STCH(Preferring, LossWeighting):
    """Follow mu log Σ_i exp(y_i / mu), a smooth maximum of the weighted losses y_i.

    `preference` is lambda (1 / T each by default) and `ideal` the ideal point z (zero by default),
    one number for each task. A small `mu` follows the worst task alone, a large one the weighted
    sum.

    The weights are w_i = lambda_i exp(y_i / mu) / Σ_j exp(y_j / mu) with y_i = lambda_i (f_i -
    z_i), for the losses f.

    The smooth Tchebycheff scalarization of Lin et al., ICML 2024 (arXiv 2402.19078). The authors'
    code for networks also replaces each loss by the logarithm of its ratio to an average: divide
    the losses before the call for that.

    Losses may have any sign. Weights of tasks far below the worst underflow to zero. If a loss is
    NaN or infinite all weights are NaN. One task has the weight lambda_1.
    """

    mu: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    preference: Preference = None
    ideal: Annotated[tuple[float, ...], Field(min_length=1)] | None = None

    @property
    def num_tasks(self) -> int | None:
        given = self.preference or self.ideal
        return None if given is None else len(given)

    tags = frozenset({"linear_under_scaling", "homogeneous", "deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        most = max(len({*(given or ())}) for given in (self.preference, self.ideal))
        return {"permutation_invariant": most <= 1}

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        shares = self.shares(num_tasks)
        if self.ideal is not None and len(self.ideal) != num_tasks:
            text = f"must be one number for each task, found {len(self.ideal)} for {num_tasks}"
            raise FieldError(self, [("ideal", text)])
        losses = losses_of(self, context, num_tasks, negative=True).numpy()
        if not np.isfinite(losses).all():
            return torch.full((num_tasks,), torch.nan, dtype=torch.float64), state
        y = shares * (losses - np.array(self.ideal or 0.0))
        sizes = np.exp((y - y.max()) / self.mu)
        return torch.from_numpy(shares * sizes / sizes.sum()), state
