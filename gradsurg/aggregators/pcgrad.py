"""PCGrad: each gradient without what conflicts with the others."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._pairwise import Order, dot, orders_of, totals, unpacked
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
)
from gradsurg.aggregators.solvers import RANK
from gradsurg.plugins.fields import validated


@validated
class PCGrad(GramianAggregator):
    """For each g_i and all other g_j in turn: if g_i · g_j < 0, g_i -= (g_i · g_j) / |g_j|² g_j.

    The result is the sum of the g_i. Algorithm 1 of Yu et al., NeurIPS 2020 (arXiv 2001.06782),
    where each task meets the others in a random order and as they were. Other code differs:

    - `order`: `random_per_task` (the paper, TorchJD, LibMTL), `one_permutation` for all tasks, or
      `fixed` (the official TensorFlow code, which shuffles in vain, and ConFIG's);
    - `reduction`: the `sum` or the `mean` (Pytorch-PCGrad);
    - `target`: g_j as it was (`original`), or what has been made of it already (`projected`);
    - `include_self`: the projected g_i meets the original g_i too (all but the paper, TorchJD and
      ConFIG); where j = i and the target is `projected` nothing happens;
    - `eps` is added to |g_j|² (1e-8 in LibMTL); with it the result depends on the scale.

    With three or more tasks the result can still conflict with one: what is put right for one task
    is undone for the next. Zero gradients meet nobody. Identical tasks do not conflict: their sum;
    opposite ones cancel, but for the last of them if the target is `projected`. One task is left
    alone. A NaN or infinity makes every weight NaN.
    """

    _: KW_ONLY
    order: Order = "random_per_task"
    reduction: Literal["sum", "mean"] = "sum"
    target: Literal["original", "projected"] = "original"
    include_self: bool = False
    eps: Annotated[float, Field(ge=0)] = 0.0

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        properties: set[AggregatorProperty] = {"strongly_stationary"}
        if not self.eps:
            properties |= {"homogeneous", "linear_under_scaling"}
        if self.order == "fixed":
            properties |= {"deterministic"}
        return frozenset(properties)

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        norms, cosines = unpacked(gramian)
        if norms is None:
            return torch.full((len(gramian),), torch.nan, dtype=torch.float64), state
        parts = self._parts(cosines, norms, orders_of(self.order, len(norms), context))
        weights = totals(parts, norms)
        if self.reduction == "mean":
            weights /= len(norms)
        return weights, state

    def _parts(
        self, cosines: list[list[float]], norms: list[float], orders: list[list[int]]
    ) -> list[list[float]]:
        """What becomes of each u_i, as coefficients of all u_k."""
        parts = []
        # Each target as such coefficients (None for u_j itself), its products with all u_k, and
        # the square of its length.
        targets: list[tuple[list[float] | None, list[float], float]]
        targets = [(None, row, 1.0) for row in cosines]
        for i, order in enumerate(orders):
            part = [0.0] * len(norms)
            part[i] = 1.0
            products = cosines[i]
            for j in order:
                if j == i and not (self.include_self and self.target == "original"):
                    continue
                target, image, square = targets[j]
                inner = products[j] if target is None else dot(target, products)
                if inner >= 0 or square <= RANK:  # little is left of the target but rounding
                    continue
                share = inner / (square + self.eps / norms[j] ** 2)
                products = [a - share * b for a, b in zip(products, image, strict=True)]
                if target is None:
                    part[j] -= share
                else:
                    part = [a - share * b for a, b in zip(part, target, strict=True)]
            parts.append(part)
            if self.target == "projected":
                targets[i] = part, products, dot(part, products)
        return parts
