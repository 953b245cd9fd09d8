"""IMTLG: the combination of the gradients with equal projections on all of them."""

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.solvers import RANK, Array, equiangular, solve_weights
from gradsurg.plugins.fields import validated


@validated
class IMTLG(Weighting):
    """d = Σ w_i g_i with Σ w_i = 1 and equal projections d · u_i on all u_i = g_i / |g_i|.

    w is G⁻¹ diag(norms) 1, normalized. Weights may be negative. If the norms differ much the common
    projection can be negative too, so that every task's loss increases.

    Equations 4 and 5 of Liu et al., ICLR 2021 ("Towards Impartial Multi-task Learning", the
    gradient part).

    For dependent gradients without such a d its projections are equal in the least-squares sense.
    Zero gradients are left out, with weight zero. Identical tasks give that gradient, opposite ones
    zero, one task is unchanged; if the weights cannot sum to one they are zero. A NaN or infinity
    makes every weight NaN.
    """

    tags = frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    def weights(self, gramian: Tensor) -> Tensor:
        return solve_weights(gramian, _equal_projections, of_two=_equal_projections_of_two)


def _equal_projections_of_two(cosine: float, first: float, second: float) -> tuple[float, float]:
    if 1 + cosine <= RANK * (1 - cosine):  # opposite: without a direction to both
        return 0.0, 0.0
    v = 1 / (1 / first + 1 / second)
    return v, v


def _equal_projections(cosines: Array, norms: Array) -> Array:
    v, met = equiangular(cosines, np.ones_like(norms))
    shares = v / norms
    total = shares.sum()
    if v @ met <= RANK or abs(total) <= RANK * np.abs(shares).sum():
        return np.zeros_like(v)
    return v / total
