"""GeometricMedian: the point with the least sum of distances to the gradients."""

import numpy as np
import torch
from torch import Tensor

from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.solvers import Array, NotConverged
from gradsurg.plugins.fields import validated

EQUAL = 1e-7
"""Distance of two gradients, relative to their norms, below which they count as one."""
TOLERANCE = 1e-9
"""Norm of a sum of unit vectors that counts as zero."""
ROUNDED = 1e-5
"""The same where rounding prevents a further descent; more where gradients are so close that their
distances, from a Gramian in float64, have fewer digits."""
MAX_STEPS = 100


@validated
class GeometricMedian(Weighting):
    """d = argmin Σ_i |d - g_i|, for tasks of which fewer than half may be faulty.

    Each gradient pulls with the same force at any distance, so a long faulty one moves d little
    further than a short one.

    Aggregation rule of Pillutla, Kakade and Harchaoui, IEEE Transactions on Signal Processing 2022
    (arXiv 1912.13445). They approximate it by three steps of a smoothed Weiszfeld algorithm. Here
    it is solved up to rounding, by Newton's method if no gradient is itself the median.

    The median is not unique if all gradients lie on a line and their number is even, which includes
    two tasks: then it is the midpoint of the two inner ones. Identical tasks give that gradient,
    one task is unchanged, and more zero gradients than others give zero. Gradients closer than 1e-7
    of their norms count as one. A NaN or infinity makes every weight NaN.
    """

    tags = frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    @np.errstate(all="ignore")
    def weights(self, gramian: Tensor) -> Tensor:
        matrix, count = gramian.numpy(), len(gramian)
        if not np.isfinite(matrix).all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        longest = float(matrix.diagonal().max())
        return torch.from_numpy(_median(matrix / longest if longest else matrix))


def _median(matrix: Array) -> Array:
    """Return the weights of the points with these inner products in their geometric median."""
    if len(matrix) == 2:  # the distance of two close points, from a Gramian, has few digits
        return np.full(2, 0.5)
    eye = np.eye(len(matrix))
    steps = eye[:, None] - eye  # from point j to point i, as coefficients of all points
    squares = matrix.diagonal()
    distances = _norms(steps, matrix)
    apart = distances > EQUAL * np.sqrt(squares + squares[:, None])
    # Point i is the median if the unit vectors to the others add up to at most the number of
    # points at i (Vardi and Zhang, PNAS 2000, equation 2.6).
    pulls = (steps / np.where(apart, distances, np.inf)[:, :, None]).sum(1)
    excess = _norms(pulls, matrix) - (~apart).sum(1)
    if excess.min() <= TOLERANCE:
        medians = excess <= TOLERANCE
        return medians / medians.sum()
    nearest = distances.sum(1).argmin()
    inverse = np.where(apart, 1 / distances, 0.0)[nearest]
    share = excess[nearest] / (excess[nearest] + (~apart)[nearest].sum())
    return _descend(matrix, eye[nearest] + share * (inverse / inverse.sum() - eye[nearest]))


def _descend(matrix: Array, w: Array) -> Array:
    """Return the weights of the median, from a point whose sum of distances is below that of every
    gradient.
    """
    eye, size = np.eye(len(w)), np.inf
    distances = _norms(w - eye, matrix)
    for _ in range(MAX_STEPS):
        c = (w - eye) / distances[:, None]
        slope = c.sum(0)
        size = float(_norms(slope, matrix))
        inverse = 1 / distances
        if size <= TOLERANCE:
            return inverse / inverse.sum()
        # Newton's step solves (Σ (1 - u_i u_iᵀ) / |d - g_i|) s = -Σ u_i, for s = Σ sigma_i g_i.
        curvature = inverse.sum() * eye - (c.T * inverse) @ c @ matrix
        ahead = w + np.linalg.solve(curvature, -slope)
        reached = _norms(ahead - eye, matrix)
        if not reached.sum() < distances.sum():
            ahead = inverse / inverse.sum()  # Weiszfeld's step, which never ascends
            reached = _norms(ahead - eye, matrix)
            rounded = max(ROUNDED, len(w) * 1e-14 / float(distances.min()) ** 2)
            if size <= rounded and not reached.sum() < distances.sum() * (1 - 1e-12):
                return ahead
        w, distances = ahead, reached
    raise NotConverged("the geometric median", size)


def _norms(coefficients: Array, matrix: Array) -> Array:
    """Return the norms of combinations of points with these inner products."""
    return np.sqrt(np.maximum((coefficients @ matrix * coefficients).sum(-1), 0.0))
