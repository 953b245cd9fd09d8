"""CAGrad: near the mean of the gradients, maximize the decrease of the worst task."""

from dataclasses import KW_ONLY
from math import sqrt
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import (
    GRAMIAN_RIDGE,
    MAX_BLOCK_PIVOTS,
    RANK,
    TOLERANCE,
    Array,
    NotConverged,
    OnRows,
    factor,
    nonnegative_least_squares,
    solve_weights,
    solve_weights_of_rows,
)
from gradsurg.plugins.fields import validated

MAX_TURNS = 100


@validated
class CAGrad(Preferring, Weighting, SolvedOnRows):
    """d = argmax min_i g_i · d over |d - g_0| <= c |g_0|: the largest decrease of the worst task
    near g_0.

    `preference` is p in g_0 = Σ p_i g_i, by default 1 / T each (the paper). `rescale` divides d at
    the end: `none` (the paper, TorchJD), `1+c`, or `1+c^2` (the default of the official code and of
    LibMTL). `c` is the radius of the ball as a share of |g_0|: with c < 1 training converges to
    stationary points of Σ p_i l_i, with c >= 1 no task's loss increases.

    In the paper's letters d = g_0 + c |g_0| g_w / |g_w|, where w minimizes g_w · g_0 + c |g_0|
    |g_w| over the simplex.

    Algorithm 1 of Liu et al., NeurIPS 2021 (arXiv 2110.14048).

    Without a preference identical tasks, and one task, give (1 + c) g, opposite ones with c >= 1
    zero, and c = 0 is Mean. A NaN or infinity makes every weight NaN. The maximizer is not unique
    if no direction improves every task (0 is in the convex hull of the gradients, as always when
    one of them is zero) but some d in the ball make none worse. In that case d is the one nearest
    to g_0, like in `DualProj`.

    For three or more nearly dependent gradients (smallest eigenvalue of the matrix of cosines below
    1e-6 T) the Gramian has too few digits. The same problem is then solved on a triangular factor
    of the gradients, from a QR decomposition in float64. The solver is nonnegative least squares
    (chapter 23 of Lawson and Hanson, Solving Least Squares Problems, 1974) with a ridge of 2e-14.
    The result is exact for the gradients as given, with one exception. 0 counts as in their convex
    hull if a convex combination of the unit gradients is shorter than 8 times the `eps` of their
    dtype (at least 1e-13, as for float64, and at most 1e-3).

    >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])  # the gradients of two tasks
    >>> gs.CAGrad(c=0.5)(rows)
    tensor([0.5000, 1.0000])
    """

    c: Annotated[float, Field(ge=0)] = 0.5
    _: KW_ONLY
    rescale: Literal["none", "1+c", "1+c^2"] = "none"
    preference: Preference = None

    tags = frozenset({"homogeneous", "deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        return {
            **super().tags_if(),
            "non_conflicting": self.c >= 1,
            "linear_under_scaling": self.c == 0,
        }

    def weights(self, gramian: Tensor) -> Tensor:
        count, shares = len(gramian), self.nonzero_shares(gramian)

        def averse(cosines: Array, norms: Array) -> Array:
            still = len(norms) < count
            return _conflict_averse(cosines, norms, norms * shares, self.c, still)

        on_rows = self._on_rows(shares, count)
        return solve_weights(gramian, averse, 1 / count, on_rows) / self._divisor

    def weights_of_rows(self, rows: Tensor, order: Tensor, ridge: float, least: float) -> Tensor:
        shares = self.shares(len(rows))[order]
        on_rows = self._on_rows(shares[np.linalg.norm(rows.numpy(), axis=1) > 0], len(rows))
        return solve_weights_of_rows(rows, on_rows, ridge, least, 1 / len(rows)) / self._divisor

    def largest_norm(self, rows: Tensor, order: Tensor) -> float:
        shares = self.shares(len(rows))[order]
        return (1 + self.c) * float(np.linalg.norm(shares @ rows.numpy())) / self._divisor

    def _on_rows(self, shares: Array, count: int) -> OnRows:
        def averse(unit: Array, norms: Array, ridge: float, least: float) -> Array:
            still = len(norms) < count
            return _conflict_averse_rows(unit, norms, ridge, least, norms * shares, self.c, still)

        return averse

    @property
    def _divisor(self) -> float:
        match self.rescale:
            case "none":
                return 1.0
            case "1+c":
                return 1 + self.c
            case "1+c^2":
                return 1 + self.c**2


def _conflict_averse(cosines: Array, norms: Array, mean: Array, c: float, still: bool) -> Array:
    """Return v of the d that maximizes min_i g_i · d over |d - g_0| <= c |g_0|; g_0 = Σ mean_i u_i.

    `still` means that a further task has a zero gradient, so the minimum is never positive. For a
    given minimum t, d is the point nearest to g_0 with u_i · d >= t / norms_i for all i. Its
    distance to g_0 increases with t; the solution is the t at which the distance is the radius. If
    no direction improves every task, the result is the d nearest to g_0 that makes none worse.
    """
    q = cosines @ mean
    radius = c * sqrt(max(float(mean @ q), 0.0))
    if radius == 0:
        return mean
    a = norms.min() / norms
    solution = _block_pivoting(cosines, q, a, radius)
    if solution is not None:
        y, t = solution
        if t <= 0 or not (still or y @ cosines @ y <= RANK * y.sum() ** 2):
            return mean + y
    unit = factor(cosines, np.finfo(float).eps)
    return _conflict_averse_rows(unit, norms, GRAMIAN_RIDGE, sqrt(RANK), mean, c, still)


def _conflict_averse_rows(
    unit: Array,
    norms: Array,
    ridge: float,
    least: float,
    mean: Array,
    c: float,
    still: bool,
) -> Array:
    """Solve the problem of `_conflict_averse` for rows of any rank, from the unit rows themselves.

    By the dual problem, in units of the smallest norm, x in the simplex minimizes |g_x + r e| for e
    = g_0 / |g_0|, at the r with |g_x| = c r. Then d = g_0 + |g_0| g_x / r. For given free rows r
    has a closed form, so free rows and r are determined in turns, between bounds of r.
    """
    center = mean @ unit
    size = sqrt(center @ center)
    if c * size == 0:
        return mean
    center /= size
    harmless = nonnegative_least_squares(unit, -center, ridge)
    moved = harmless @ unit
    ones = np.ones(len(unit))
    # With c = 1 and nothing but 0 that harms no task, `moved` is -center up to rounding.
    inside = moved @ moved <= c**2 * (1 + 1e-9)
    if inside and (still or _hull_distance(unit, ones, ridge) <= least):
        return mean + size * harmless
    a = norms.min() / norms
    low, high = 0.0, 1 / (c * float(a.min()))
    r = min(_hull_distance(unit, a, ridge) / c, high)
    rows, direction = np.hstack([unit, ridge * np.eye(len(unit))]), np.append(center, 0 * ones)
    free = None
    for _ in range(MAX_TURNS):
        free = _nearest_in_hull(unit + r * a[:, None] * center, a, ridge, free) > 0
        basis, upper = np.linalg.qr(rows[free].T)
        normal = np.linalg.solve(upper.T, a[free])
        nearest = normal / (normal @ normal)  # the point of the affine hull nearest to 0
        shares = basis.T @ direction
        turned = nearest * (normal @ shares) - shares
        square, room = nearest @ nearest, c**2 - turned @ turned
        root = sqrt(square / room) if room > 0 else np.inf
        if abs(root - r) <= TOLERANCE * r or high - low <= TOLERANCE * low:
            y = np.zeros(len(unit))
            y[free] = np.linalg.solve(upper, nearest / root + turned)
            return mean + size * y
        low, high = (r, high) if root > r else (low, r)
        r = root if low < root < high else sqrt(low * high) if low else high / 1e3
    raise NotConverged("CAGrad's search", high / max(low, 1e-300) - 1)


def _hull_distance(unit: Array, a: Array, ridge: float) -> float:
    """Return the norm of the shortest v @ unit with v >= 0 and a · v = 1."""
    v = _nearest_in_hull(unit, a, ridge)
    return float(np.linalg.norm(v @ unit) / (a @ v))


def _nearest_in_hull(
    rows: Array, a: Array, ridge: float, start: NDArray[np.bool_] | None = None
) -> Array:
    """Return a multiple of the v >= 0 with a · v = 1 that minimizes |v @ rows|."""
    extended, target = np.hstack([rows, a[:, None]]), np.append(np.zeros(rows.shape[1]), 1.0)
    return nonnegative_least_squares(extended, target, ridge, start)


def _block_pivoting(
    cosines: Array, q: Array, a: Array, radius: float
) -> tuple[Array, float] | None:
    """Return y >= 0 of d = g_0 + Σ y_i u_i, and t, by block principal pivoting; None if it fails.

    On the active rows F, C_F y = t a - q, so yᵀ C y = radius² is quadratic in t.
    """
    free = np.zeros(len(q), dtype=bool)
    free[(q / a).argmin()] = True
    for _ in range(len(q) + MAX_BLOCK_PIVOTS):
        index = np.flatnonzero(free)
        if not len(index):
            return None
        block = cosines[index[:, None], index]
        sides = np.stack([a[index], q[index]], axis=1)
        try:
            solved = np.linalg.solve(block, sides)
        except np.linalg.LinAlgError:
            return None
        (growth, cross), (_, start) = (sides.T @ solved).tolist()
        if not growth > 0:
            return None
        t = (cross + sqrt(max(cross**2 - growth * (start - radius**2), 0.0))) / growth
        y = np.zeros(len(q))
        y[index] = t * solved[:, 0] - solved[:, 1]
        size = radius + float(np.abs(y).max())
        if not size <= 1e4 * (radius + float(np.abs(q).max())):
            return None
        slack = cosines @ y + q - t * a
        wrong = np.where(free, y, slack) < -TOLERANCE * size
        if not wrong.any():
            off = abs(y @ cosines @ y / radius**2 - 1)
            return (y.clip(0), t) if off <= 1e-9 else None
        free ^= wrong
    return None
