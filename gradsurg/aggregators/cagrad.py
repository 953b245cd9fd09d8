"""CAGrad: near the mean of the gradients, what is best for the task that it helps least."""

from dataclasses import KW_ONLY
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from gradsurg.aggregators import _averse, _pairs
from gradsurg.aggregators._solvers import Array, weights_of
from gradsurg.aggregators.base import Property, Weighting
from gradsurg.plugins.fields import validated


@validated
class CAGrad(Weighting):
    """d = argmax min_i g_i · d over |d - g_0| <= c |g_0|, where g_0 is the mean of the gradients.

    In the paper's letters d = g_0 + c |g_0| g_w / |g_w| with w = argmin of
    g_w · g_0 + c |g_0| |g_w| over the simplex. Algorithm 1 of Liu et al., NeurIPS 2021
    (arXiv 2110.14048). With c < 1 it converges where the mean does; with c >= 1 no task's loss
    grows. `rescale` divides d at the end: by nothing (the paper, TorchJD), by `1+c`, or by `1+c^2`
    (the default of the official code and of LibMTL).

    Where no direction helps every task (0 is in the hull of the gradients, so always where one is
    zero) but some in the ball harm none, all of these are as good, and d is the one nearest to
    g_0, which DualProj gives. Identical tasks give (1 + c) g, as does one task; opposite ones with
    c >= 1 zero. Only c = 0 is Mean. A NaN or infinity makes every weight NaN.
    """

    c: Annotated[float, Field(ge=0)] = 0.5
    _: KW_ONLY
    rescale: Literal["none", "1+c", "1+c^2"] = "none"

    @property
    def properties(self) -> frozenset[Property]:
        properties: set[Property] = {
            "permutation_invariant",
            "homogeneous",
            "strongly_stationary",
            "deterministic",
        }
        if self.c >= 1:
            properties |= {"non_conflicting"}
        if self.c == 0:
            properties |= {"linear_under_scaling"}
        return frozenset(properties)

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)

        def averse(cosines: Array, norms: Array) -> Array:
            still = len(norms) < count
            return _averse.conflict_averse(cosines, norms, norms / count, self.c, still)

        pair = partial(_pairs.conflict_averse, c=self.c)
        weights = weights_of(gramian, averse, pair, idle=1 / count)
        match self.rescale:
            case "none":
                return weights
            case "1+c":
                return weights / (1 + self.c)
            case "1+c^2":
                return weights / (1 + self.c**2)
