"""UPGrad: the mean of the gradients, each projected onto the cone of non-conflicting directions."""

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import Array, project_onto_dual_cone, solve_weights
from gradsurg.plugins.fields import validated


@validated
class UPGrad(Weighting):
    """The mean over i of the point nearest to g_i among the d with g_j · d >= 0 for all j.

    w = Σ_i argmin_{v >= e_i} vᵀ G v / T, solved by active sets on the cosines, so the result
    conflicts with no task at any ratio of norms. Equation 5 of Quinton and Rey 2024 (arXiv
    2406.16232).

    A zero gradient contributes nothing and imposes no constraint. Identical tasks give their mean,
    opposite ones zero, one task is unchanged. For dependent gradients the weights are not unique,
    but the result is. A NaN or infinity makes every weight NaN.
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

        return solve_weights(gramian, projected, _project_each_pair, idle=1 / count)


def _project_each_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The mean of the projections of both rows onto the cone of the d with g_i · d >= 0."""
    against = max(-cosine, 0.0)
    return (norm + against * other) / 2, (other + against * norm) / 2
