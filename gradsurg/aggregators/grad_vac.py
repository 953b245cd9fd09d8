"""GradVac: rotate each gradient towards the others, up to the moving average of their cosine."""

from dataclasses import KW_ONLY
from math import sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._pairwise import Order, dot, draw_orders, norms_and_cosines, row_weights
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
)
from gradsurg.aggregators.solvers import RANK
from gradsurg.plugins.fields import validated


@validated
class GradVac(GramianAggregator):
    """Rotate each gradient towards the others, up to the moving average m_ij of their cosine.

    It is `PCGrad` with m_ij as the target of each cosine instead of zero, and with the same choices
    of `order`.

    For each g_i and all other g_j, in turn, let c = cos(g_i, g_j) and m = m_ij. If c < m, add |g_i|
    (m sqrt(1 - c²) - c sqrt(1 - m²)) / (|g_j| sqrt(1 - m²)) g_j to g_i, after which their cosine is
    m. Then m_ij moves towards c by the share `beta`: m_ij = (1 - beta) m_ij + beta c. The result is
    the sum of the g_i.

    Algorithm 1 of Wang et al., ICLR 2021 (arXiv 2010.05874), with the paper's beta; LibMTL updates
    m only where c < m, and has beta = 0.5.

    The state is m (T, T), zeros at first: the first call is PCGrad. For three or more tasks the
    result can conflict with one of them, which also holds for PCGrad. A zero gradient has cosine
    zero to all others and is left out. Identical tasks give their sum, opposite tasks cancel, one
    task is unchanged. If m is 1 no multiple of g_j reaches it, and nothing is added. A NaN or
    infinity makes every weight NaN and keeps the state.
    """

    beta: Annotated[float, Field(gt=0, le=1)] = 0.01
    _: KW_ONLY
    order: Order = "random_per_task"

    tags = frozenset({"homogeneous", "linear_under_scaling", "strongly_stationary"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        return {"deterministic": self.order == "fixed"}

    def init(self, num_tasks: int) -> AggregatorState:
        return {"cosines": torch.zeros(num_tasks, num_tasks, dtype=torch.float64)}

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        norms, cosines = norms_and_cosines(gramian)
        if norms is None:
            return torch.full((len(gramian),), torch.nan, dtype=torch.float64), state
        usual = state["cosines"].tolist()
        parts = []
        for i, order in enumerate(draw_orders(self.order, len(norms), context)):
            part = [0.0] * len(norms)
            part[i] = 1.0
            products = cosines[i]
            for j in order:
                if j == i:
                    continue
                length = sqrt(max(dot(part, products), 0.0))
                cosine = max(-1.0, min(1.0, products[j] / length)) if length else 0.0
                share = length * _share(cosine, usual[i][j]) if norms[i] and norms[j] else 0.0
                if share:
                    part[j] += share
                    products = [a + share * b for a, b in zip(products, cosines[j], strict=True)]
                usual[i][j] = (1 - self.beta) * usual[i][j] + self.beta * cosine
            parts.append(part)
        return row_weights(parts, norms), {"cosines": torch.tensor(usual, dtype=torch.float64)}


def _share(cosine: float, usual: float) -> float:
    """Return the multiple of |g_i| u_j that raises the cosine to `usual`; 0 if there is none."""
    free = 1 - usual**2
    if cosine >= usual or free <= RANK:
        return 0.0
    return usual * sqrt((1 - cosine**2) / free) - cosine
