"""ConFIG: the direction with the same cosine to every gradient."""

from dataclasses import KW_ONLY
from functools import partial

import numpy as np
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.solvers import RANK, Array, equiangular, solve_weights
from gradsurg.plugins.fields import validated


@validated
class ConFIG(Preferring, Weighting):
    """d = (Σ_i g_i · u) u, where the unit vector u has the same cosine to every gradient.

    `preference` is p, the ratio of the cosines of d to the gradients, by default equal.

    u is U⁺ p normalized to length one, and the rows of U are g_i / |g_i|. U⁺ p = Uᵀ (U Uᵀ)⁺ p, so
    the cosines of the gradients suffice, and no decomposition of a T x P matrix is needed.

    Equation 2 of Liu et al., ICLR 2025 (arXiv 2408.11104).

    If the gradients are independent no task's loss increases. For dependent gradients without such
    a direction u is the least-squares approximation, which may conflict with some. Zero gradients
    are left out, with weight zero. Identical tasks give their sum, opposite ones zero, one task is
    unchanged. A NaN or infinity makes every weight NaN.
    """

    _: KW_ONLY
    preference: Preference = None

    tags = frozenset({"linear_under_scaling", "homogeneous", "deterministic"})
    if_positive = frozenset()

    def weights(self, gramian: Tensor) -> Tensor:
        shares = self.nonzero_shares(gramian)
        return solve_weights(gramian, partial(_conflict_free, shares=shares))


def _conflict_free(cosines: Array, norms: Array, shares: Array) -> Array:
    v, met = equiangular(cosines, shares / shares.max() if shares.any() else shares)
    square = v @ met
    return v * (norms @ met / square) if square > RANK else np.zeros_like(v)
