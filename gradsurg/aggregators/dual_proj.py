"""DualProj: project the mean of the gradients onto the cone of non-conflicting directions."""

from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import (
    Array,
    project_mean_pair,
    project_onto_dual_cone,
    solve_weights,
)
from gradsurg.plugins.fields import validated


@validated
class DualProj(Weighting):
    """The point nearest to the mean g_0 of the gradients among the d with g_j · d >= 0 for all j.

    w = argmin_{v >= 1/T} vᵀ G v, solved by an active set on the cosines, so the result conflicts
    with no task at any ratio of norms. Equation 11 of Lopez-Paz and Ranzato, NeurIPS 2017 (arXiv
    1706.08840), with the mean in place of the gradient of the current task.

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
                "homogeneous",
                "strongly_stationary",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)

        def projected(cosines: Array, norms: Array) -> Array:
            return project_onto_dual_cone(cosines, norms[None] / count)[0]

        return solve_weights(gramian, projected, project_mean_pair, idle=1 / count)
