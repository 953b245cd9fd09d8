"""FairGrad: an alpha-fair allocation of the decrease among the tasks."""

from dataclasses import KW_ONLY
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import bargain, limit_norm, solve_weights
from gradsurg.plugins.fields import validated

LARGEST_POWER = 1e10
"""Bound on 1/alpha and on alpha: beyond it the solution is the same at the precision of a Gramian.
"""


@validated
class FairGrad(Weighting):
    """w > 0 with G w = w^(-1/alpha), entry by entry: the alpha-fair direction in a ball.

    `alpha` near 0 gives the sum, or where the sum conflicts with a task the nearest direction that
    does not (see `DualProj`). An `alpha` of 1 gives `NashMTL`. Towards infinity the worst task
    decides, like in `MGDA`. The norm of the result is limited to `max_norm`, with 0 for no limit,
    like in the official code.

    Equation 4 of Ban and Ji, ICML 2024 (arXiv 2402.15638), solved by Newton's method to about 1e-7
    except for negligible weights.

    If no direction improves every task (0 is in the convex hull of the gradients) there is no
    solution, and the weights are zero. Opposite tasks are such a case. Zero gradients have weight
    zero. Identical tasks, and one task, give the direction of their gradient. A NaN or infinity
    makes every weight NaN.
    """

    alpha: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    max_norm: Annotated[float, Field(ge=0)] = 1.0

    tags = frozenset({"non_conflicting", "permutation_invariant", "deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        return {"scale_invariant": self.alpha == 1}

    def weights(self, gramian: Tensor) -> Tensor:
        power = min(max(1 / self.alpha, 1 / LARGEST_POWER), LARGEST_POWER)
        weights = solve_weights(gramian, partial(bargain, power=power))
        return limit_norm(weights, gramian, self.max_norm)
