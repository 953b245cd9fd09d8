"""UPGrad: the mean of the gradients, each turned until it harms no task."""

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import Array, onto_dual_cone, weights_of
from gradsurg.plugins.fields import validated


@validated
class UPGrad(Weighting):
    """The mean over i of what is nearest to g_i among the d with g_j · d >= 0 for all j.

    w = Σ_i argmin_{v >= e_i} vᵀ G v / T, solved by active sets on the cosines, so that nothing
    conflicts, whatever the norms. Equation 5 of Quinton and Rey 2024 (arXiv 2406.16232).

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
                "linear_under_scaling",
                "homogeneous",
                "strongly_stationary",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)

        def projected(cosines: Array, norms: Array) -> Array:
            return norms @ onto_dual_cone(cosines, np.eye(len(norms))) / count

        return weights_of(gramian, projected, _each_projected_pair, idle=1 / count)


def _each_projected_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The mean of what is nearest to each with g_i · d >= 0 for both."""
    against = max(-cosine, 0.0)
    return (norm + against * other) / 2, (other + against * norm) / 2
