"""ConFIG: the direction with the same cosine to every gradient."""

from dataclasses import KW_ONLY
from functools import partial

import numpy as np
from torch import Tensor

from gradsurg.aggregators._preference import (
    Preference,
    check_preference,
    is_symmetric,
    nonzero_shares,
)
from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import RANK, Array, equiangular, solve_weights
from gradsurg.plugins.fields import validated


@validated
class ConFIG(Weighting):
    """d = (Σ_i g_i · u) u, where u is U⁺ p normalized to length one; the rows of U are g_i / |g_i|.

    `preference` is p, the ratio of the cosines of d to the gradients, by default equal. Equation 2
    of Liu et al., ICLR 2025 (arXiv 2408.11104). U⁺ p = Uᵀ (U Uᵀ)⁺ p, so the cosines of the
    gradients suffice, and no decomposition of a T x P matrix is needed. If the gradients are
    independent no task's loss increases.

    For dependent gradients without such a direction u is the least-squares approximation, which may
    conflict with some. Zero gradients are left out, with weight zero. Identical tasks give their
    sum, opposite ones zero, one task is unchanged. A NaN or infinity makes every weight NaN.
    """

    _: KW_ONLY
    preference: Preference = None

    def __post_init__(self) -> None:
        check_preference(self.preference)

    @property
    def num_tasks(self) -> int | None:
        return None if self.preference is None else len(self.preference)

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        properties: set[AggregatorProperty] = {
            "linear_under_scaling",
            "homogeneous",
            "deterministic",
        }
        if is_symmetric(self.preference):
            properties |= {"permutation_invariant"}
        return frozenset(properties)

    def weights(self, gramian: Tensor) -> Tensor:
        shares = nonzero_shares(self, self.preference, gramian)
        return solve_weights(gramian, partial(_conflict_free, shares=shares))


def _conflict_free(cosines: Array, norms: Array, shares: Array) -> Array:
    v, met = equiangular(cosines, shares / shares.max() if shares.any() else shares)
    square = v @ met
    return v * (norms @ met / square) if square > RANK else np.zeros_like(v)
