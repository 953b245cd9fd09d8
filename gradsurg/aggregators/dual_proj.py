"""DualProj: the mean of the gradients, turned until it harms no task."""

from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import (
    Array,
    onto_dual_cone,
    project_mean_of_pair,
    weights_of,
)
from gradsurg.plugins.fields import validated


@validated
class DualProj(Weighting):
    """What is nearest to the mean g_0 of the gradients among the d with g_j · d >= 0 for all j.

    w = argmin_{v >= 1/T} vᵀ G v, solved by an active set on the cosines, so that nothing conflicts,
    whatever the norms. Equation 11 of Lopez-Paz and Ranzato, NeurIPS 2017 (arXiv 1706.08840), with
    the mean in place of the gradient of the current task.

    A zero gradient adds nothing and forbids nothing. Identical tasks give their mean, opposite ones
    zero, one task its own. Where the gradients are dependent the weights are not unique; the
    result is. A NaN or infinity makes every weight NaN.
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
            return onto_dual_cone(cosines, norms[None] / count)[0]

        return weights_of(gramian, projected, project_mean_of_pair, idle=1 / count)
