"""FairGrad: the tasks bargain for the direction, with a fairness of one's choice."""

from dataclasses import KW_ONLY
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import bargain_of_pair, bargained, limited, weights_of
from gradsurg.plugins.fields import validated

FARTHEST = 1e10
"""From here on, and from one over it on, another alpha changes no digit that a Gramian has."""


@validated
class FairGrad(Weighting):
    """w > 0 with G w = w^(-1/alpha), entry by entry: the alpha-fair direction in a ball.

    Solved by Newton's method, to about 1e-7 but for weights that are next to nothing. Near 0 it is
    the sum, and where that conflicts with a task what is nearest to it and does not, as in
    DualProj; 1 is NashMTL; towards infinity the worst task decides, as in MGDA. Equation 4 of Ban
    and Ji, ICML 2024 (arXiv 2402.15638). As in the official code |d| is limited to `max_norm`, 0
    for no limit.

    Where no direction helps every task (0 is in the hull of the gradients) there is no solution,
    and the weights are zero: so it is for opposite tasks. Zero gradients do not bargain: their
    weight is zero. Identical tasks and one task give that direction. A NaN or infinity makes every
    weight NaN.
    """

    alpha: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    max_norm: Annotated[float, Field(ge=0)] = 1.0

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        properties: set[AggregatorProperty] = {
            "non_conflicting",
            "permutation_invariant",
            "deterministic",
        }
        if self.alpha == 1:
            properties |= {"scale_invariant"}
        return frozenset(properties)

    def weights(self, gramian: Tensor) -> Tensor:
        pair = bargain_of_pair if self.alpha == 1 else None
        power = min(max(1 / self.alpha, 1 / FARTHEST), FARTHEST)
        weights = weights_of(gramian, partial(bargained, power=power), pair)
        return limited(weights, gramian, self.max_norm)
