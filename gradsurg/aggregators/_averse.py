"""CAGrad's problem: the direction in a ball around the mean that is best for the worst task."""

from math import sqrt

import numpy as np

from gradsurg.aggregators._solvers import (
    EXCHANGES,
    RANK,
    TOLERANCE,
    Array,
    NotConverged,
    cosines_of,
    factor,
    nonnegative,
    shortest,
)


def conflict_averse(cosines: Array, norms: Array, mean: Array, c: float, still: bool) -> Array:
    """v of the d that maximizes min_i g_i · d over |d - g_0| <= c |g_0|; g_0 = Σ mean_i u_i.

    `still` says that some further task has no gradient, so that the minimum is never positive.
    With t for the minimum, d is what is nearest to g_0 with u_i · d >= t / norms_i for all i: its
    distance grows with t, and the one t is sought at which it is the radius. If t would be positive
    but no direction helps every task, any d in the ball that harms none is as good: the nearest.
    """
    q = cosines @ mean
    radius = c * sqrt(max(float(mean @ q), 0.0))
    if radius == 0:
        return mean
    a = norms.min() / norms
    found = _exchanged(cosines, q, a, radius)
    if found is not None:
        y, t = found
        if t <= 0 or not (still or y @ cosines @ y <= RANK * y.sum() ** 2):
            return mean + y
    harmless = nonnegative(cosines, -q[None])[0]
    inside = harmless @ cosines @ harmless <= radius**2
    if inside and (still or _stationary(cosines)):
        return mean + harmless
    return mean + _bisected(cosines, norms, mean, radius)


def _exchanged(cosines: Array, q: Array, a: Array, radius: float) -> tuple[Array, float] | None:
    """y >= 0 of d = g_0 + Σ y_i u_i, and t, by exchanges of whole blocks; None if these fail.

    On the rows F that hold d back, C_F y = t a - q, so yᵀ C y = radius² is quadratic in t.
    """
    free = np.zeros(len(q), dtype=bool)
    free[(q / a).argmin()] = True
    for _ in range(len(q) + EXCHANGES):
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


def _stationary(cosines: Array) -> bool:
    """Whether no direction helps every row."""
    x = shortest(cosines, np.ones(len(cosines)))
    return bool(x @ cosines @ x <= RANK)


def _bisected(cosines: Array, norms: Array, mean: Array, radius: float) -> Array:
    """y of the same d, whatever the rank: d = g_0 + g_x / r, where g_x is the combination of the
    simplex for which g_x + r g_0 is shortest, at the one r with |g_x| = r * radius.
    """
    unit = factor(cosines, np.finfo(float).eps)
    rows, center = norms[:, None] * unit, mean @ unit
    low, high = 0.0, float(norms.max()) / radius
    y = np.zeros(len(norms))
    for _ in range(200):
        r = (low + high) / 2
        x = _hull(rows + r * center)
        length = float(np.linalg.norm(x @ rows))
        y = x * norms / r
        if abs(length - r * radius) <= 1e-13 * length or high - low <= 1e-15 * high:
            break
        low, high = (r, high) if length > r * radius else (low, r)
    left = abs(float(np.linalg.norm(y @ unit)) / radius - 1)
    if not left <= 1e-7:
        raise NotConverged("CAGrad's search", left)
    return y


def _hull(rows: Array) -> Array:
    """The weights x of the simplex with the shortest Σ x_i row_i."""
    norms = np.linalg.norm(rows, axis=1)
    if not norms.all():
        return (norms == 0) / (norms == 0).sum()
    return shortest(cosines_of(rows @ rows.T, norms), norms) / norms
