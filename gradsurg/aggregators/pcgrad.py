"""PCGrad: project each gradient to remove its conflicts with the others."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

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
class PCGrad(GramianAggregator):
    """Project each gradient to remove its conflicts with the others, and add up the results.

    The defaults are the paper's; other values select variants in other code:

    - `order`: `random_per_task` (the paper, TorchJD, LibMTL), `one_permutation` for all tasks, or
      `fixed` (ConFIG's code, and the official TensorFlow code, whose shuffle has no effect);
    - `reduction`: the `sum` or the `mean` (Pytorch-PCGrad);
    - `target`: the `original` g_j, or the `projected` one where it has been projected already;
    - `include_self`: the projected g_i meets the original g_i too (all except the paper, TorchJD
      and ConFIG); no effect if the target is `projected`;
    - `eps` is added to |g_j|² (1e-8 in LibMTL); with it the result depends on the scale.

    For each g_i and all other g_j in turn, if g_i · g_j < 0, g_i -= (g_i · g_j) / |g_j|² g_j. Each
    task meets the original gradients of the others in a random order.

    Algorithm 1 of Yu et al., NeurIPS 2020 (arXiv 2001.06782).

    With three or more tasks the result can still conflict with one of them, because a later
    projection may undo an earlier one. Zero gradients are skipped. Identical tasks give their sum;
    opposite ones cancel, except the last of them if the target is `projected`. One task is
    unchanged. A NaN or infinity makes every weight NaN.

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.PCGrad()(rows)
    tensor([0.8000, 2.4000])
    """

    _: KW_ONLY
    order: Order = "random_per_task"
    reduction: Literal["sum", "mean"] = "sum"
    target: Literal["original", "projected"] = "original"
    include_self: bool = False
    eps: Annotated[float, Field(ge=0)] = 0.0

    tags = frozenset({"strongly_stationary"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        return {
            "homogeneous": not self.eps,
            "linear_under_scaling": not self.eps,
            "deterministic": self.order == "fixed",
        }

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        norms, cosines = norms_and_cosines(gramian)
        if norms is None:
            return torch.full((len(gramian),), torch.nan, dtype=torch.float64), state
        parts = self._parts(cosines, norms, draw_orders(self.order, len(norms), context))
        weights = row_weights(parts, norms)
        if self.reduction == "mean":
            weights /= len(norms)
        return weights, state

    def _parts(
        self, cosines: list[list[float]], norms: list[float], orders: list[list[int]]
    ) -> list[list[float]]:
        """Return each projected g_i / |g_i| as coefficients of all u_k."""
        parts = []
        # For each target: its coefficients (None for u_j itself), its products with all u_k, and
        # its squared norm.
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
                if inner >= 0 or square <= RANK:  # a small square is rounding
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
