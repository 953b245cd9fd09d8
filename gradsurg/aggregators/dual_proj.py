"""DualProj: project the mean of the gradients onto the cone of non-conflicting directions."""

from functools import partial

from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import (
    Array,
    project_mean_pair,
    project_onto_dual_cone,
    project_rows_onto_dual_cone,
    solve_weights,
    solve_weights_of_rows,
)
from gradsurg.plugins.fields import validated


@validated
class DualProj(Weighting, SolvedOnRows):
    """The point nearest to the mean g_0 of the gradients among the d with g_j · d >= 0 for all j.

    w = argmin_{v >= 1/T} vᵀ G v, solved by an active set on the cosines, so the result conflicts
    with no task at any ratio of norms. Equation 11 of Lopez-Paz and Ranzato, NeurIPS 2017 (arXiv
    1706.08840), with the mean in place of the gradient of the current task.

    A zero gradient contributes nothing and imposes no constraint. Identical tasks give their mean,
    opposite ones zero, one task is unchanged. For dependent gradients the weights are not unique,
    but the result is. A NaN or infinity makes every weight NaN.

    Of three or more nearly dependent gradients (smallest eigenvalue of the matrix of cosines below
    1e-6 T) the Gramian has too few digits: there the same problem is solved on a triangular factor
    of the gradients, by a QR decomposition in float64 and nonnegative least squares (chapter 23 of
    Lawson and Hanson, Solving Least Squares Problems, 1974) with a ridge of 2e-14. The result is
    that of the gradients as they are, rounding included, and no longer than their mean.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {
                "non_conflicting",
                "permutation_invariant",
                "homogeneous",
                "strongly_stationary",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)

        def projected(cosines: Array, norms: Array) -> Array:
            return project_onto_dual_cone(cosines, norms[None] / count)[0]

        on_rows = partial(_projected_rows, count=count)
        return solve_weights(gramian, projected, project_mean_pair, 1 / count, on_rows)

    def weights_of_rows(self, rows: Tensor, ridge: float, least: float) -> Tensor:
        on_rows = partial(_projected_rows, count=len(rows))
        return solve_weights_of_rows(rows, on_rows, ridge, least, idle=1 / len(rows))

    def largest_norm(self, rows: Tensor) -> float:
        return float(rows.mean(dim=0).norm())


def _projected_rows(unit: Array, norms: Array, ridge: float, _: float, count: int) -> Array:
    return project_rows_onto_dual_cone(unit, norms[None] / count, ridge)[0]
