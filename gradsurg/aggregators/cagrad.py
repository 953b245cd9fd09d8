"""CAGrad: near the mean of the gradients, maximize the decrease of the worst task."""

from dataclasses import KW_ONLY
from functools import partial
from math import sqrt
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.solvers import (
    MAX_BLOCK_PIVOTS,
    RANK,
    TOLERANCE,
    Array,
    NotConverged,
    cosines_of,
    factor,
    min_norm_in_hull,
    nonnegative_qp,
    project_mean_pair,
    solve_weights,
)
from gradsurg.plugins.fields import validated

EQUAL = 1e-14  # two rows are equal if |g_1 - g_2|² is below this share of |g_1|² + |g_2|²


@validated
class CAGrad(Weighting):
    """d = argmax min_i g_i · d over |d - g_0| <= c |g_0|, where g_0 is the mean of the gradients.

    In the paper's letters d = g_0 + c |g_0| g_w / |g_w| with w = argmin of g_w · g_0 + c |g_0|
    |g_w| over the simplex. Algorithm 1 of Liu et al., NeurIPS 2021 (arXiv 2110.14048). With c < 1
    it converges where the mean does; with c >= 1 no task's loss increases. `rescale` divides d at
    the end: `none` (the paper, TorchJD), `1+c`, or `1+c^2` (the default of the official code and of
    LibMTL).

    The maximizer is not unique if no direction improves every task (0 is in the convex hull of the
    gradients, as always when one of them is zero) but some d in the ball make none worse: then d is
    the one nearest to g_0, as in DualProj. Identical tasks, and one task, give (1 + c) g; opposite
    ones with c >= 1 give zero. c = 0 is Mean. A NaN or infinity makes every weight NaN.
    """

    c: Annotated[float, Field(ge=0)] = 0.5
    _: KW_ONLY
    rescale: Literal["none", "1+c", "1+c^2"] = "none"

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        properties: set[AggregatorProperty] = {
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
            return _conflict_averse(cosines, norms, norms / count, self.c, still)

        pair = partial(_conflict_averse_pair, c=self.c)
        weights = solve_weights(gramian, averse, pair, idle=1 / count)
        match self.rescale:
            case "none":
                return weights
            case "1+c":
                return weights / (1 + self.c)
            case "1+c^2":
                return weights / (1 + self.c**2)


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
    harmless = nonnegative_qp(cosines, -q[None], np.array([[norms.max()]]))[0]
    inside = harmless @ cosines @ harmless <= radius**2
    if inside and (still or _is_stationary(cosines)):
        return mean + harmless
    return mean + _bisection(cosines, norms, mean, radius)


def _conflict_averse_pair(
    cosine: float, norm: float, other: float, c: float
) -> tuple[float, float]:
    """Return the d in the ball |d - g_0| <= c |g_0| that maximizes min(g_1 · d, g_2 · d)."""
    first, second = norm / 2, other / 2
    inner = cosine * norm * other
    radius = c * sqrt(max(norm**2 + other**2 + 2 * inner, 0.0)) / 2
    on_first, on_second = first + cosine * second, second + cosine * first
    if norm * (on_first + radius) <= other * (on_second + cosine * radius):
        return first + radius, second
    if other * (on_second + radius) <= norm * (on_first + cosine * radius):
        return first, second + radius
    # Equal decrease: d is on the line perpendicular to g_1 - g_2, at the boundary of the ball.
    apart = norm**2 + other**2 - 2 * inner
    if apart <= EQUAL * (norm**2 + other**2):
        return first + radius / 2, second + radius / 2
    back = (first - second) * (first + second) * 2 / apart
    shares = (other**2 - inner) / apart, (norm**2 - inner) / apart
    reach = sqrt(max(radius**2 - back**2 * apart, 0.0))
    height = norm * other * sqrt((1 - cosine) * (1 + cosine) / apart)  # distance of the line from 0
    # No direction improves both tasks: take the one nearest to the mean that harms neither.
    y = norm * (shares[0] * reach - back * height), other * (shares[1] * reach + back * height)
    if height == 0 or (radius * height) ** 2 <= RANK * (y[0] + y[1]) ** 2:
        return project_mean_pair(cosine, norm, other)
    return first + y[0] / height, second + y[1] / height


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


def _is_stationary(cosines: Array) -> bool:
    """Whether no direction has a positive product with every row."""
    x = min_norm_in_hull(cosines, np.ones(len(cosines)))
    return bool(x @ cosines @ x <= RANK)


def _bisection(cosines: Array, norms: Array, mean: Array, radius: float) -> Array:
    """Return y of the same d by bisection, for rows of any rank.

    d = g_0 + g_x / r, where g_x is the convex combination that minimizes |g_x + r g_0|, at the r
    with |g_x| = r * radius.
    """
    unit = factor(cosines, np.finfo(float).eps)
    rows, center = norms[:, None] * unit, mean @ unit
    low, high = 0.0, float(norms.max()) / radius
    y = np.zeros(len(norms))
    for _ in range(200):
        r = (low + high) / 2
        x = _min_norm_weights(rows + r * center)
        length = float(np.linalg.norm(x @ rows))
        y = x * norms / r
        if abs(length - r * radius) <= 1e-13 * length or high - low <= 1e-15 * high:
            break
        low, high = (r, high) if length > r * radius else (low, r)
    left = abs(float(np.linalg.norm(y @ unit)) / radius - 1)
    if not left <= 1e-7:
        raise NotConverged("CAGrad's search", left)
    return y


def _min_norm_weights(rows: Array) -> Array:
    """Return the weights x of the simplex that minimize |Σ x_i row_i|."""
    norms = np.linalg.norm(rows, axis=1)
    if not norms.all():
        return (norms == 0) / (norms == 0).sum()
    return min_norm_in_hull(cosines_of(rows @ rows.T, norms), norms) / norms
