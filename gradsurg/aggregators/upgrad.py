"""UPGrad: the mean of the gradients, each projected onto the cone of non-conflicting directions."""

from functools import partial

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
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
class UPGrad(Weighting, SolvedOnRows):
    """The mean over i of the point nearest to g_i among the d with g_j · d >= 0 for all j.

    w = Σ_i argmin_{v >= e_i} vᵀ G v / T, solved by active sets on the cosines, so the result
    conflicts with no task at any ratio of norms. Equation 5 of Quinton and Rey 2024 (arXiv
    2406.16232).

    A zero gradient contributes nothing and imposes no constraint. Identical tasks give their mean,
    opposite ones zero, one task is unchanged. For dependent gradients the weights are not unique,
    but the result is. A NaN or infinity makes every weight NaN.

    Of three or more nearly dependent gradients (smallest eigenvalue of the matrix of cosines below
    1e-6 T) the Gramian has too few digits: there the same problem is solved on a triangular factor
    of the gradients, by a QR decomposition in float64 and nonnegative least squares (chapter 23 of
    Lawson and Hanson, Solving Least Squares Problems, 1974) with a ridge of 2e-14. The result is
    that of the gradients as they are, rounding included, and no longer than the mean norm.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {
                "non_conflicting",
                "permutation_invariant",
                "linear_under_scaling",
                "homogeneous",
                "strongly_stationary",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)

        def projected(cosines: Array, norms: Array) -> Array:
            return norms @ project_onto_dual_cone(cosines, np.eye(len(norms))) / count

        on_rows = partial(_projected_rows, count=count)
        return solve_weights(gramian, projected, _project_each_pair, 1 / count, on_rows)

    def weights_of_rows(self, rows: Tensor, ridge: float, least: float) -> Tensor:
        on_rows = partial(_projected_rows, count=len(rows))
        return solve_weights_of_rows(rows, on_rows, ridge, least, idle=1 / len(rows))

    def largest_norm(self, rows: Tensor) -> float:
        return float(rows.norm(dim=1).mean())


def _projected_rows(unit: Array, norms: Array, ridge: float, _: float, count: int) -> Array:
    return norms @ project_rows_onto_dual_cone(unit, np.eye(len(norms)), ridge) / count


def _project_each_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The mean of the projections of both rows onto the cone of the d with g_i · d >= 0."""
    against = max(-cosine, 0.0)
    return (norm + against * other) / 2, (other + against * norm) / 2
