"""MGDA: the shortest convex combination of the gradients."""

from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import shortest, weights_of
from gradsurg.plugins.fields import validated


@validated
class MGDA(Weighting):
    """w = argmin wᵀ G w over w >= 0, Σ w_i = 1: the shortest vector of the hull of the gradients.

    Solved to the last digit by an active set. No task's loss grows, and where no direction helps
    every task the result is zero; so it stops at the first Pareto-stationary point, and follows
    the smallest gradients. Désidéri, Comptes Rendus Mathématique 2012; equation 3 of Sener and
    Koltun, NeurIPS 2018 (arXiv 1810.04650), whose normalizations of the gradients are left out.

    A zero gradient is the shortest: it takes all the weight and the result is zero. Identical tasks
    give that gradient, opposite ones zero, one task its own. A NaN or infinity makes every weight
    NaN.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {
                "non_conflicting",
                "permutation_invariant",
                "homogeneous",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        return weights_of(gramian, shortest, _shortest_pair, idle=None)


def _shortest_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The shortest x_1 g_1 + x_2 g_2 with x_1 + x_2 = 1, both >= 0."""
    low, high = (norm, other) if norm <= other else (other, norm)
    ratio = low / high
    # |g_1 - g_2|² / high², which is zero only where the two are the same.
    apart = (1 - ratio) ** 2 + 2 * ratio * (1 - cosine)
    share = 0.5 if apart <= 0 else min(max(ratio * (ratio - cosine) / apart, 0.0), 1.0)
    if norm <= other:
        return (1 - share) * norm, share * other
    return share * norm, (1 - share) * other
