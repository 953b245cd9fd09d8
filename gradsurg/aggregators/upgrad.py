"""UPGrad: the mean of the gradients, each projected onto the cone of non-conflicting directions."""

from dataclasses import KW_ONLY
from functools import partial

import numpy as np
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import (
    Array,
    project_onto_dual_cone,
    project_rows_onto_dual_cone,
    solve_weights,
    solve_weights_of_rows,
)
from gradsurg.plugins.fields import validated


@validated
class UPGrad(Preferring, Weighting, SolvedOnRows):
    """Average the gradients, each projected onto the cone of directions that conflict with no task.

    `preference` is p, by default 1 / T each.

    The result is Σ p_i d_i, where d_i is the point nearest to g_i among the d with g_j · d >= 0 for
    all j. The weights are w = Σ_i p_i argmin_{v >= e_i} vᵀ G v, solved by active sets on the
    cosines, so the result conflicts with no task at any ratio of norms.

    Equation 5 of Quinton and Rey 2024 (arXiv 2406.16232).

    A zero gradient contributes nothing and imposes no constraint. Without a preference identical
    tasks give their mean, opposite ones zero, one task is unchanged. For dependent gradients the
    weights are not unique, but the result is. A NaN or infinity makes every weight NaN.

    For three or more nearly dependent gradients (smallest eigenvalue of the matrix of cosines below
    1e-6 T) the Gramian has too few digits. The same problem is then solved on a triangular factor
    of the gradients, from a QR decomposition in float64. The solver is nonnegative least squares
    (chapter 23 of Lawson and Hanson, Solving Least Squares Problems, 1974) with a ridge of 2e-14.
    The result is exact for the gradients as given, with their rounding, and no longer than Σ p_i
    |g_i|.

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.UPGrad()(rows)
    tensor([0.4000, 1.2000])
    """

    _: KW_ONLY
    preference: Preference = None

    tags = frozenset({"non_conflicting", "linear_under_scaling", "homogeneous", "deterministic"})

    def weights(self, gramian: Tensor) -> Tensor:
        shares = self.shares(len(gramian))

        def projected(cosines: Array, norms: Array) -> Array:
            nonzero = self.nonzero_shares(gramian)
            return (nonzero * norms) @ project_onto_dual_cone(cosines, np.eye(len(norms)))

        def of_two(cosine: float, first: float, second: float) -> tuple[float, float]:
            removed = min(cosine, 0.0)
            first, second = float(shares[0]) * first, float(shares[1]) * second
            return first - removed * second, second - removed * first

        def on_rows(unit: Array, norms: Array, ridge: float, least: float) -> Array:
            return _projected_rows(unit, norms, ridge, least, self.nonzero_shares(gramian))

        return solve_weights(gramian, projected, 1 / len(gramian), on_rows, of_two)

    def weights_of_rows(self, rows: Tensor, order: Tensor, ridge: float, least: float) -> Tensor:
        shares = self.shares(len(rows))[order]
        nonzero = shares[np.linalg.norm(rows.numpy(), axis=1) > 0]
        on_rows = partial(_projected_rows, shares=nonzero)
        return solve_weights_of_rows(rows, on_rows, ridge, least, idle=1 / len(rows))

    def largest_norm(self, rows: Tensor, order: Tensor) -> float:
        shares = self.shares(len(rows))[order]
        return float(shares @ np.linalg.norm(rows.numpy(), axis=1))


def _projected_rows(unit: Array, norms: Array, ridge: float, _: float, shares: Array) -> Array:
    return (shares * norms) @ project_rows_onto_dual_cone(unit, np.eye(len(norms)), ridge)
