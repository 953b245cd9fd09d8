"""IMTLG: the combination of the gradients that goes as far along each of them."""

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import RANK, Array, equiangular, weights_of
from gradsurg.plugins.fields import validated


@validated
class IMTLG(Weighting):
    """d = Σ w_i g_i with Σ w_i = 1 whose projections d · u_i on all u_i = g_i / |g_i| are the same.

    w is G⁻¹ diag(norms) 1, scaled. Equations 4 and 5 of Liu et al., ICLR 2021 ("Towards Impartial
    Multi-task Learning", the part on gradients). Weights may be negative: if the norms differ much
    the common projection can be negative too, and every task is harmed.

    Where the gradients are dependent and no such d exists, its projections are as near to one
    another as can be. Zero gradients are left out, with weight zero. Identical tasks give that
    gradient, opposite ones zero, one task its own; where the weights cannot sum to one they are
    zero. A NaN or infinity makes every weight NaN.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    def weights(self, gramian: Tensor) -> Tensor:
        return weights_of(gramian, _impartial, _impartial_pair)


def _impartial(cosines: Array, norms: Array) -> Array:
    v, met = equiangular(cosines)
    shares = v / norms
    total = shares.sum()
    if v @ met <= RANK or abs(total) <= RANK * np.abs(shares).sum():
        return np.zeros_like(v)
    return v / total


def _impartial_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The same projection on each unit gradient, and weights that sum to one."""
    if 1 + cosine <= RANK * (1 - cosine):
        return 0.0, 0.0
    both = norm * other / (norm + other)
    return both, both
