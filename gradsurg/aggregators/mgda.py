"""MGDA: the minimum-norm convex combination of the gradients."""

from dataclasses import KW_ONLY

import numpy as np
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.solvers import Array, min_norm_in_hull, solve_weights
from gradsurg.plugins.fields import Contradiction, validated


@validated
class MGDA(Preferring, Weighting):
    """w = argmin wᵀ G w over the simplex: the minimum-norm point of the convex hull of the
    gradients.

    With a `preference` p > 0, one number for each task, it is the minimum-norm point of the hull of
    the p_i g_i, the gradients of the losses p_i l_i. So a larger p_i gives task i a smaller weight.

    The simplex has w >= 0 and Σ w_i = 1. Solved to machine precision by an active set. No task's
    loss increases, and the result is zero where no direction improves every task, so training stops
    at the first Pareto-stationary point. It is dominated by the smallest gradients.

    Désidéri, Comptes Rendus Mathématique 2012; equation 3 of Sener and Koltun, NeurIPS 2018 (arXiv
    1810.04650), without their normalizations of the gradients.

    A zero gradient takes all the weight and the result is zero. Identical tasks give that gradient,
    opposite ones zero, one task is unchanged. A NaN or infinity makes every weight NaN.

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.MGDA()(rows)
    tensor([0.5000, 0.5000])
    """

    _: KW_ONLY
    preference: Preference = None

    def __post_init__(self) -> None:
        if self.preference is not None and not min(self.preference) > 0:
            text = f"must be above 0 for each task, found {list(self.preference)}"
            raise Contradiction("preference", text)

    tags = frozenset({"non_conflicting", "homogeneous", "deterministic"})
    if_positive = frozenset()

    def weights(self, gramian: Tensor) -> Tensor:
        shares = np.ones(len(gramian)) if self.preference is None else self.shares(len(gramian))

        def general(cosines: Array, norms: Array) -> Array:
            return min_norm_in_hull(cosines, shares * norms)  # with a zero row it is not called

        def of_two(cosine: float, first: float, second: float) -> tuple[float, float]:
            first, second = shares[0] * first, shares[1] * second
            longer, shorter = max(first, second), min(first, second)
            if cosine * longer >= shorter:  # the shorter row is nearest to zero
                return first * (first <= second), second * (first > second)
            ratio = shorter / longer
            part, other = 1 - cosine * ratio, ratio * (ratio - cosine)
            v, w = shorter * part / (part + other), longer * other / (part + other)
            return (v, w) if first <= second else (w, v)

        return solve_weights(gramian, general, idle=None, of_two=of_two)
