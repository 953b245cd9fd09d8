"""ConFIG: the direction with the same cosine to every gradient."""

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import RANK, Array, equiangular, solve_weights
from gradsurg.plugins.fields import validated


@validated
class ConFIG(Weighting):
    """d = (Σ_i g_i · u) u, where u is U⁺ 1 normalized to length one; the rows of U are g_i / |g_i|.

    Equation 2 of Liu et al., ICLR 2025 (arXiv 2408.11104). U⁺ 1 = Uᵀ (U Uᵀ)⁺ 1, so the cosines of
    the gradients suffice, and no decomposition of a T x P matrix is needed. If the gradients are
    independent no task's loss increases.

    For dependent gradients without such a direction u is the least-squares approximation, which may
    conflict with some. Zero gradients are left out, with weight zero. Identical tasks give their
    sum, opposite ones zero, one task is unchanged. A NaN or infinity makes every weight NaN.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {"permutation_invariant", "linear_under_scaling", "homogeneous", "deterministic"}
        )

    def weights(self, gramian: Tensor) -> Tensor:
        return solve_weights(gramian, _conflict_free, _conflict_free_pair)


def _conflict_free(cosines: Array, norms: Array) -> Array:
    v, met = equiangular(cosines)
    square = v @ met
    return v * (norms @ met / square) if square > RANK else np.zeros_like(v)


def _conflict_free_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The bisector, with the sum of the projections of both rows on it as its norm."""
    if 1 + cosine <= RANK * (1 - cosine):
        return 0.0, 0.0
    return (norm + other) / 2, (norm + other) / 2
