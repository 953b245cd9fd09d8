"""Combine nearly dependent rows, from a triangular factor of the rows in place of their Gramian.

A Gramian G = J Jᵀ in float64 shows singular values of J down to 1e-8 of the largest, a QR
decomposition of J down to 1e-16. Below, weights are computed from the factor, and the update is
checked against the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurg.aggregators.rows import combine_in_order, triangular_factor
from gradsurg.aggregators.solvers import NotConverged

RIDGES = (2e-14, 1e-12, 1e-10, 1e-8, 1e-6)
"""Ridges of the solvers, relative to unit rows; each is tried if the one before fails."""
TOO_LONG = 1e-4
"""Relative excess of the norm of an update over its bound at which a solution is refused."""
TOO_MUCH_CONFLICT = 1e-6
"""Largest -g_i · d of a fallback, relative to |g_i| and to the bound of |d|."""
LEAST = 1e-13
"""Norm of a convex combination of unit rows in float64 that counts as zero."""
LARGEST_LEAST = 1e-3
"""Bound of the same for rows in half precision."""


class SolvedOnRows(ABC):
    """A second base class of weightings that need the rows where these are nearly dependent.

    Their weights grow without bound there, and cancel in the update.
    """

    @abstractmethod
    def weights_of_rows(self, rows: Tensor, ridge: float, least: float) -> Tensor:
        """Return the weights (T,) from any `rows` (T, r) with the Gramian of J, in float64.

        `ridge` and `least` are those of `solvers.solve_weights_of_rows`.
        """

    @abstractmethod
    def largest_norm(self, rows: Tensor) -> float:
        """Return the largest norm that the update of these rows can have."""


@dataclass(frozen=True)
class RowSolution:
    """The combined gradient of each block, the weights, and whether a larger ridge was needed."""

    grads: list[Tensor]
    weights: Tensor
    fell_back: bool


def solve_on_rows(
    problem: SolvedOnRows, blocks: Sequence[Tensor], gramian: Tensor, scale: float, harmless: bool
) -> RowSolution:
    """Return the update of the rows in `blocks`, which are multiplied by a loss `scale`.

    The norm of the update on the rows is checked, and after a fallback, if `harmless`, that it
    conflicts with no row. The rows are sorted first, so that rounding does not depend on the order
    of the tasks. Raises NotConverged if every ridge fails.
    """
    order = gramian.diagonal().argsort(stable=True)
    rows = triangular_factor(blocks, order) / scale
    norms = rows.norm(dim=1)
    bound = problem.largest_norm(rows)
    precision = max(torch.finfo(block.dtype).eps for block in blocks)
    least = min(max(8 * precision, LEAST), LARGEST_LEAST)
    longest = bound * (1 + TOO_LONG + precision) + 1e-15 * float(norms.max())
    excess = torch.inf
    weights = torch.empty_like(norms)
    for ridge in RIDGES:
        try:
            weights[order] = problem.weights_of_rows(rows, ridge, least)
        except NotConverged as error:
            excess = error.residual
            continue
        grads = combine_in_order(blocks, weights, order)
        norm = _norm(grads) / scale
        fell_back = ridge != RIDGES[0]
        if norm <= longest and not (fell_back and harmless and _conflicts(blocks, grads, bound)):
            return RowSolution(grads, weights, fell_back)
        excess = norm / bound - 1 if bound else torch.inf
    raise NotConverged("the solver for nearly dependent rows", excess)


def _norm(grads: Sequence[Tensor]) -> float:
    return sum(float(grad.double().square().sum()) for grad in grads) ** 0.5


def _conflicts(blocks: Sequence[Tensor], grads: Sequence[Tensor], bound: float) -> bool:
    """Whether the update increases the loss of a task, beyond rounding."""
    pairs = list(zip(blocks, grads, strict=True))
    products = sum((rows.double() @ grad.double()).cpu() for rows, grad in pairs)
    norms = sum(rows.double().square().sum(1).cpu() for rows in blocks) ** 0.5
    return bool((products < -TOO_MUCH_CONFLICT * norms * bound).any())
