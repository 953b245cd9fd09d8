"""CenteredClip: the mean of the gradients, with a bound on the distance of each to the result."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import Weighting
from gradsurg.plugins.fields import validated


@validated
class CenteredClip(Weighting):
    """Average the gradients, with a bound on the distance of each to the result.

    `tau` is the norm to which the differences g_i - v are clipped. So no task moves the result by
    more than tau / T in one of the `num_steps` steps, and some tasks may be faulty.

    Each step is v <- v + 1 / T Σ_i (g_i - v) min(1, tau / |g_i - v|), and the first starts from v =
    0.

    Algorithm 2 of Karimireddy, He and Jaggi, ICML 2021 (arXiv 2012.10333). In the paper v starts
    from the result of the step before, and the gradients are momenta. Here v starts from zero, so
    one step is the mean of the gradients clipped to the norm tau, and tau limits a step's length.

    Zero gradients pull to zero. Identical tasks give that gradient, scaled down to a norm of
    `num_steps` tau if it is longer; opposite ones of equal norm give zero. A NaN or infinity makes
    every weight NaN.
    """

    tau: Annotated[float, Field(gt=0)] = 10.0
    _: KW_ONLY
    num_steps: Annotated[int, Field(ge=1)] = 3

    tags = frozenset({"permutation_invariant", "strongly_stationary", "deterministic"})

    @np.errstate(all="ignore")
    def weights(self, gramian: Tensor) -> Tensor:
        matrix, count = gramian.numpy(), len(gramian)
        if not np.isfinite(matrix).all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        w = np.zeros(count)
        for _ in range(self.num_steps):
            inner = matrix @ w
            squares = np.maximum(matrix.diagonal() - 2 * inner + w @ inner, 0.0)
            clips = self.tau / np.maximum(np.sqrt(squares), self.tau)
            w = w + (clips - clips.sum() * w) / count
        return torch.from_numpy(w)
