"""AlignedMTL: replace the gradients by the nearest orthogonal ones of equal norm."""

from functools import partial
from math import sqrt
from typing import Literal

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import RANK, Array, factor, solve_weights
from gradsurg.plugins.fields import validated

Scale = Literal["min", "median", "rmse"]


@validated
class AlignedMTL(Weighting):
    """w = sigma G^(-1/2) 1 / T: the mean of the nearest orthogonal gradients of norm sigma.

    `scale` selects sigma: the smallest singular value of J (`min`), the `median` one, or the root
    of the mean of their squares (`rmse`). Algorithm 1 of Senushkin et al., CVPR 2023 (arXiv
    2305.19000), has the smallest; the official code has all three.

    For dependent gradients (judged by their cosines, so that a small gradient does not count as
    dependent) G^(-1/2) is the pseudoinverse and sigma is taken over the nonzero singular values.
    Zero gradients have weight zero. Parallel gradients, of the same or the opposite sign, give
    their mean; one task is unchanged. A NaN or infinity makes every weight NaN.
    """

    scale: Scale = "min"

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {"permutation_invariant", "homogeneous", "strongly_stationary", "deterministic"}
        )

    def weights(self, gramian: Tensor) -> Tensor:
        general = partial(_aligned, count=len(gramian), scale=self.scale)
        return solve_weights(gramian, general, partial(_aligned_pair, scale=self.scale))


def _aligned(cosines: Array, norms: Array, count: int, scale: Scale) -> Array:
    # The singular values of a factor of G, as roots of the eigenvalues of G lose half the digits.
    # The longest row comes first, so that small singular values keep their relative precision.
    order = np.argsort(-norms)
    rows = norms[order, None] * factor(cosines)[order]
    vectors, sigmas, _ = np.linalg.svd(rows, full_matrices=False)
    v = np.empty_like(norms)
    v[order] = norms[order] * (vectors @ (vectors.sum(0) / sigmas)) / count
    match scale:
        case "min":
            return v * sigmas[-1]
        case "median":
            return v * sigmas[len(sigmas) // 2]
        case "rmse":
            return v * np.sqrt((sigmas**2).mean())


def _aligned_pair(cosine: float, norm: float, other: float, scale: Scale) -> tuple[float, float]:
    first, second, large, small = _root(cosine, norm, other)
    match scale:
        case "min" | "median":
            sigma = small or large
        case "rmse":
            sigma = ((norm**2 + other**2) / (2 if small else 1)) ** 0.5
    return first * sigma, second * sigma


def _root(cosine: float, norm: float, other: float) -> tuple[float, float, float, float]:
    """Return v of G^(-1/2) applied to the weights of the mean, and the singular values of two rows.

    For parallel rows it is the pseudoinverse, and the second singular value is zero.
    """
    trace = norm**2 + other**2
    if 1 - abs(cosine) <= RANK * (1 + abs(cosine)):
        sign = 1 if cosine > 0 else -1
        along = (norm + sign * other) / 2 / trace**1.5
        return norm**2 * along, sign * other**2 * along, sqrt(trace), 0.0
    area = norm * other * sqrt((1 - cosine) * (1 + cosine))
    total = sqrt(trace + 2 * area)
    large = (total + sqrt(max(trace - 2 * area, 0.0))) / 2
    inner = cosine * norm * other
    first, second = (square - inner + area for square in (other**2, norm**2))
    scale = 2 * area * total
    return norm * first / scale, other * second / scale, large, area / large
