"""AlignedMTL: replace the gradients by the nearest orthogonal ones of equal norm."""

from dataclasses import KW_ONLY
from functools import partial
from typing import Literal

import numpy as np
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.solvers import Array, factor, solve_weights
from gradsurg.plugins.fields import validated

Scale = Literal["min", "median", "rmse"]


@validated
class AlignedMTL(Preferring, Weighting):
    """w = sigma G^(-1/2) p: a sum of the nearest orthogonal gradients of norm sigma.

    `preference` is p, by default 1 / T each, for their mean (as in the paper). `scale` selects
    sigma: the smallest singular value of J (`min`), the `median` one, or the root of the mean of
    their squares (`rmse`).

    Algorithm 1 of Senushkin et al., CVPR 2023 (arXiv 2305.19000), has the smallest; the official
    code has all three.

    For dependent gradients G^(-1/2) is the pseudoinverse, and sigma is taken over the nonzero
    singular values. Dependence is judged by the cosines, so that a small gradient does not count as
    dependent. Zero gradients have weight zero. Without a preference parallel gradients, of the same
    or the opposite sign, give their mean, and one task is unchanged. A NaN or infinity makes every
    weight NaN.
    """

    scale: Scale = "min"
    _: KW_ONLY
    preference: Preference = None

    tags = frozenset({"homogeneous", "deterministic"})

    def weights(self, gramian: Tensor) -> Tensor:
        shares = self.nonzero_shares(gramian)
        return solve_weights(gramian, partial(_aligned, shares=shares, scale=self.scale))


def _aligned(cosines: Array, norms: Array, shares: Array, scale: Scale) -> Array:
    # The singular values of a factor of G, as roots of the eigenvalues of G lose half the digits.
    # The longest row comes first, so that small singular values keep their relative precision.
    order = np.argsort(-norms)
    rows = norms[order, None] * factor(cosines)[order]
    vectors, sigmas, _ = np.linalg.svd(rows, full_matrices=False)
    v = np.empty_like(norms)
    v[order] = norms[order] * (vectors @ (shares[order] @ vectors / sigmas))
    match scale:
        case "min":
            return v * sigmas[-1]
        case "median":
            return v * sigmas[len(sigmas) // 2]
        case "rmse":
            return v * np.sqrt((sigmas**2).mean())
