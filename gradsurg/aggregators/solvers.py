"""Exact solvers in float64 for the T x T problems of aggregators, on the cosines of the gradients.

Throughout, `cosines` is C = D⁻¹ G D⁻¹ with D = diag(norms), and u_i = g_i / |g_i| are the unit
rows. A solution v stands for the gradient Σ v_i u_i, so the weights of the rows are v / norms.
Norms that differ by a factor of 1e6 cost no digits.

Some quantities count as zero, since a Gramian in float32 precision cannot distinguish them from
zero. They are an eigenvalue of C below RANK times the largest, and the squared norm of a convex
combination of unit rows below RANK. Problems whose solutions grow without bound near there are
solved by nonnegative least squares, on the unit rows or a triangular factor of them.
"""

from collections.abc import Callable
from itertools import pairwise
from math import isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
General = Callable[[Array, Array], Array]
OfTwo = Callable[[float, float, float], tuple[float, float]]
OnRows = Callable[[Array, Array, float, float], Array]

RANK = 1e-6
TOLERANCE = 1e-12
ROUNDING = 1e-15  # relative to the longest vector: the error of a sum in float64
SMALL_RIDGE = 1e-10  # for a unique solution where rows are dependent
GRAMIAN_RIDGE = 1e-7  # singular values of the rows that a Gramian in float64 cannot show
MAX_BLOCK_PIVOTS = 8  # block pivots before falling back to one variable at a time
NEWTON_STEPS = 200
POWER_STEP = 4.0  # factor between the powers of a continuation
TINY = 1e-30  # relative to the largest entry: negligible


class NotConverged(ArithmeticError):
    """A solver did not reach its tolerance; `residual` is the relative residual."""

    def __init__(self, problem: str, residual: float) -> None:
        self.residual = residual
        super().__init__(f"{problem} did not converge: relative residual {residual:.1e}")


def solve_weights(
    gramian: Tensor,
    general: General,
    idle: float | None = 0.0,
    on_rows: OnRows | None = None,
    of_two: OfTwo | None = None,
) -> Tensor:
    """Return the weights (T,) of the rows: `general(cosines, norms)`, divided by the norms.

    For nearly dependent rows `on_rows` (see `solve_weights_of_rows`) takes the place of `general`;
    for two rows `of_two(cosine, norm, other norm)` does, without the cost of arrays. Rows of norm
    zero are left out of the problem and get the weight `idle`. If `idle` is None they share a total
    weight of 1 and all others get 0. NaN or infinity anywhere in G makes every weight NaN.
    """
    count = len(gramian)
    if of_two is not None and count == 2:
        (first, inner), (_, second) = gramian.tolist()
        norms = sqrt(first), sqrt(second)
        if isfinite(first + second + inner) and min(norms) > 0:
            v = of_two(min(max(inner / norms[0] / norms[1], -1.0), 1.0), *norms)
            return torch.from_numpy(np.array([v[0] / norms[0], v[1] / norms[1]]))
    rows = _cosines_and_norms(gramian.double().numpy())
    if rows is None:
        return torch.full((count,), torch.nan, dtype=torch.float64)
    alive, norms, cosines = rows
    if idle is None and len(norms) < count:
        return torch.from_numpy(~alive / (~alive).sum())
    if on_rows is not None and _is_singular(cosines):
        unit = factor(cosines, np.finfo(float).eps)
        v = on_rows(unit, norms, GRAMIAN_RIDGE, sqrt(RANK))
    else:
        v = general(cosines, norms) if len(norms) else norms
    if len(norms) == count:
        return torch.from_numpy(v / norms)
    return _with_idle(v / norms, alive, idle or 0.0)


def solve_weights_of_rows(
    rows: Tensor, on_rows: OnRows, ridge: float, least: float, idle: float = 0.0
) -> Tensor:
    """Return the weights (T,) of `rows`: `on_rows(unit rows, norms, ridge, least)` over the norms.

    `ridge` bounds the weights, see `nonnegative_least_squares`; a convex combination of unit rows
    that is shorter than `least` counts as zero. Rows of norm zero get the weight `idle`.
    """
    matrix = rows.numpy()
    norms = np.linalg.norm(matrix, axis=1)
    alive = norms > 0
    matrix, norms = matrix[alive], norms[alive]
    v = on_rows(matrix / norms[:, None], norms, ridge, least)
    return _with_idle(v / norms, alive, idle)


def _with_idle(shares: Array, alive: NDArray[np.bool_], idle: float) -> Tensor:
    weights = np.full(len(alive), idle)
    weights[alive] = shares
    return torch.from_numpy(weights)


def is_nearly_dependent(gramian: Tensor) -> bool:
    """Return whether three or more rows are so nearly dependent that a Gramian does not determine
    them.
    """
    rows = _cosines_and_norms(gramian.numpy()) if len(gramian) > 2 else None
    return rows is not None and _is_singular(rows[2])


def _is_singular(cosines: Array) -> bool:
    """Whether an eigenvalue is below RANK times the number of rows."""
    if len(cosines) == 2:  # the smallest eigenvalue is 1 - |cosine|
        return abs(cosines[0, 1]) > 1 - 2 * RANK
    shifted = cosines - RANK * len(cosines) * np.eye(len(cosines))
    try:
        np.linalg.cholesky(shifted)
    except np.linalg.LinAlgError:
        return True
    return False


def _cosines_and_norms(matrix: Array) -> tuple[NDArray[np.bool_], Array, Array] | None:
    """Return the mask of the nonzero rows, their norms and cosines; None if G is not finite."""
    if not np.isfinite(matrix).all():
        return None
    norms = np.sqrt(matrix.diagonal())
    alive = norms > 0
    if not alive.all():
        norms, matrix = norms[alive], matrix[np.ix_(alive, alive)]
    return alive, norms, cosines_of(matrix, norms)


def cosines_of(matrix: Array, norms: Array) -> Array:
    # `clip` takes three times as long for a few rows.
    return np.maximum(np.minimum(matrix / norms / norms[:, None], 1.0), -1.0)


def factor(matrix: Array, tolerance: float = RANK) -> Array:
    """Return A (T, rank) with A Aᵀ = `matrix`, without eigenvalues below `tolerance` times the
    largest.
    """
    values, vectors = np.linalg.eigh(matrix)
    kept = values > tolerance * values[-1]
    return vectors[:, kept] * np.sqrt(values[kept])


def equiangular(cosines: Array, target: Array) -> tuple[Array, Array]:
    """Return v = C⁺ t, the direction with cosines to the rows in the ratio of `target`, and C v.

    C v is t if the rows are independent, otherwise its least-squares approximation, with the
    minimum-norm v.
    """
    values, vectors = np.linalg.eigh(cosines)
    first = values.searchsorted(RANK * values[-1], side="right")  # they ascend
    vectors = vectors[:, first:]
    sums = target @ vectors
    return vectors @ (sums / values[first:]), vectors @ sums


def project_onto_dual_cone(cosines: Array, targets: Array) -> Array:
    """Project each target onto the cone of the d with u_i · d >= 0 for all i.

    `targets` has one target in each row, as coefficients of the unit rows.
    """
    scale = np.abs(targets).max(1, keepdims=True)
    return targets + nonnegative_qp(cosines, -targets @ cosines, scale)


def project_rows_onto_dual_cone(unit: Array, targets: Array, ridge: float) -> Array:
    """Project like `project_onto_dual_cone`, but on the unit rows themselves, for nearly dependent
    ones.
    """
    moved = [nonnegative_least_squares(unit, -target @ unit, ridge) for target in targets]
    return targets + np.array(moved)


def min_norm_in_hull(cosines: Array, norms: Array) -> Array:
    """Return the minimum-norm point of the convex hull of the rows.

    With a = 1 / norms: minimize vᵀ C v over v >= 0, aᵀ v = 1. The solution is a multiple of the
    minimizer of vᵀ C v + (aᵀ v - 1)² over v >= 0.
    """
    a = norms.min() / norms
    v = nonnegative_qp(cosines + a[:, None] * a, a[None], np.ones((1, 1)))[0]
    return v / (v / norms).sum()


def nonnegative_qp(matrix: Array, linear: Array, scale: Array) -> Array:
    """Return, for each row b of `linear`, the y >= 0 that minimizes yᵀ Q y / 2 - bᵀ y, Q =
    `matrix`.

    b must be in the range of Q. `scale` (a column) is the size of the terms whose difference b is:
    tolerances are relative to it.

    Block principal pivoting (Kim and Park, SIAM J. Sci. Comput. 2011, algorithm 2) on all rows at
    once; rows that do not converge are solved one at a time by Lawson and Hanson's algorithm, which
    also works for a singular Q.
    """
    eye = np.eye(len(matrix))
    free = linear > 0
    y = np.zeros_like(linear)
    wrong = free
    for _ in range(MAX_BLOCK_PIVOTS):
        if not wrong.any():
            return y.clip(0)
        blocks = np.where(free[:, :, None] & free[:, None, :], matrix, eye)
        try:
            y = np.linalg.solve(blocks, np.where(free, linear, 0.0)[:, :, None])[:, :, 0]
        except np.linalg.LinAlgError:
            wrong = np.ones_like(free)
            break
        margin = TOLERANCE * (scale + np.abs(y).max(1, keepdims=True))
        wrong = np.where(free, y, y @ matrix - linear) < -margin
        # Far larger than any solution for independent rows: the rows of this block are dependent.
        wrong |= ~(np.abs(y) <= 1e4 * scale)
        free = free ^ wrong
    rows = factor(matrix, np.finfo(float).eps)
    for index in np.flatnonzero(wrong.any(1)):
        target = np.linalg.lstsq(rows, linear[index], rcond=None)[0]
        outside = float(np.abs(rows @ target - linear[index]).max() / scale[index, 0])
        if outside > 1e-4:  # more than the rounding of G can cause
            raise NotConverged("a nonnegative quadratic program without a bound", outside)
        y[index] = nonnegative_least_squares(rows, target, SMALL_RIDGE)
    return y.clip(0)


def nonnegative_least_squares(
    rows: Array, target: Array, ridge: float, start: NDArray[np.bool_] | None = None
) -> Array:
    """Return the y >= 0 that minimizes |rowsᵀ y - target|² + ridge² |y|².

    The ridge keeps |y| below |target| / ridge, at the cost of products with the rows that are wrong
    by ridge |target| at most. Lawson and Hanson 1974, algorithm NNLS, with an orthonormal basis of
    the free rows, so that small singular values of the rows keep all digits of float64. `start` is
    a guess of the positive entries of y; a good one saves time.
    """
    count = len(rows)
    rows = np.hstack([rows, ridge * np.eye(count)])
    target = np.concatenate([target, np.zeros(count)])
    y = np.zeros(count)
    size = sqrt(target @ target)
    free = np.zeros(count, dtype=bool)
    barred = free.copy()
    residual, worst = target, 0.0
    if start is not None and start.any():
        step, left = _least_squares(rows, start, target)
        if (step[start] > 0).all():
            y, residual, free = step, left, start.copy()
    for _ in range(10 * count):
        slope = rows @ residual
        slope[free] = 0.0
        worst = float(slope.max(initial=0.0))
        slope[barred] = 0.0
        enters = slope.argmax()
        if slope[enters] <= ROUNDING * size:
            break
        free[enters] = True
        step, left = _least_squares(rows, free, target)
        if step[enters] <= 0:  # by rounding: the row depends on the free rows
            free[enters] = False
            barred[enters] = True
            continue
        barred[:] = False
        while (leaving := free & (step <= 0)).any():
            shares = np.where(leaving, y / np.where(leaving, y - step, 1.0), np.inf)
            first = shares.argmin()
            y += shares[first] * (step - y)
            y[first] = 0.0
            free &= y > 0
            step, left = _least_squares(rows, free, target)
        y, residual = step, left
    if not worst <= TOLERANCE * size:
        raise NotConverged("nonnegative least squares", worst / size)
    return y


def _least_squares(rows: Array, free: NDArray[np.bool_], target: Array) -> tuple[Array, Array]:
    """Return the least-squares solution of the free variables, with zeros, and its residual."""
    basis, upper = np.linalg.qr(rows[free].T)
    shares = target @ basis
    residual = target - basis @ shares
    again = residual @ basis  # the second time for all digits of a short residual
    fitted = np.zeros(len(rows))
    fitted[free] = np.linalg.solve(upper, shares + again)
    return fitted, residual - basis @ again


def bargain(cosines: Array, norms: Array, power: float) -> Array:
    """Return v for the solution w > 0 of G w = w^(-power): C v = k v^(-power), k = norms^(power -
    1).

    With s = norms^((power - 1) / (power + 1)) and v = s z this is C v = s z^(-power). There z is 1
    for orthogonal rows, so neither the norms nor the power cause an overflow. A power far from 1 is
    reached from one near 1 by continuation, by a factor of POWER_STEP at a time.

    If some v >= 0 has Σ v_i u_i = 0 (no direction has a positive product with every row) there is
    no solution, and v is zero.
    """
    exponent = (power - 1) / (power + 1)
    scale = norms.max() if power > 1 else norms.min()
    unit = (norms / scale) ** exponent
    powers = [power]
    while not 1 / POWER_STEP <= powers[0] <= POWER_STEP:
        powers.insert(0, powers[0] * (POWER_STEP if power < 1 else 1 / POWER_STEP))
    z = _newton(np.ones_like(unit), cosines, unit, powers[0])
    for before, now in pairwise(powers):
        if not z.any():
            break
        # Start of the next power: keep z^(-power) where z is small, and z where it is large.
        z = np.where(z < 1, np.maximum(z, TINY) ** (before / now), z)
        z = _newton(z, cosines, unit, now)
    return unit * z * scale**exponent


def _newton(z: Array, cosines: Array, unit: Array, power: float) -> Array:
    """Return z of C v = s z^(-power), v = s z, s = `unit`; zero if there is no solution.

    Damped Newton on the strictly convex vᵀ C v / 2 - Σ s_i² z_i^(1 - power) / (1 - power), or with
    s_i² log z_i at power 1.
    """
    v, slope, wanted, energy = _residual(cosines, z, unit, power)
    if energy > 0:  # scale z so that vᵀ C v = v · wanted
        z = z * (float(v @ wanted) / energy) ** (1 / (power + 1))
        v, slope, wanted, energy = _residual(cosines, z, unit, power)
    change, root = np.inf, sqrt(max(power, 1.0))
    for _ in range(NEWTON_STEPS):
        if energy <= RANK * v.sum() ** 2:
            return np.zeros_like(v)
        curved = cosines.copy()
        curved.flat[:: len(v) + 1] += power * wanted / v  # the diagonal
        try:
            step = -np.linalg.solve(curved, slope)
        except np.linalg.LinAlgError:
            break
        relative = step / v
        if power < 1 and (idle := z < TINY * z.max()).any():
            relative[idle] = np.maximum(relative[idle], -0.9)
            step = relative * v
            change = float(np.abs(relative[~idle]).max())
        else:
            change = float(np.abs(relative).max())
        fall = -float(slope @ step)
        lost = power < 1 and fall <= 1e-15 * energy
        # Newton's error is about the square of the change.
        if change * root <= (1e-4 if lost else 1e-7):
            return z + z * relative
        # Damping 1 / (1 + decrement) suffices at power 1, where the function is self-concordant.
        share = 1.0 if power != 1 or fall < 0.05 else 1 / (1 + sqrt(fall))
        share = min(share, 0.9 / max(float(-relative.min()), 0.9))
        while True:
            ahead = z + share * z * relative
            v, slope, wanted, energy = _residual(cosines, ahead, unit, power)
            if float(slope @ step) <= fall / 2 or share < 1e-9 or lost:
                break
            share /= 2
        z = ahead
    if change * root <= 1e-5:  # the rounding of nearly dependent rows keeps it above 1e-7
        return z
    shares = min_norm_in_hull(cosines, np.ones_like(unit))
    if shares @ cosines @ shares <= RANK:
        return np.zeros_like(unit)
    raise NotConverged("G w = w^(-1/alpha)", change)


def _residual(
    cosines: Array, z: Array, unit: Array, power: float
) -> tuple[Array, Array, Array, float]:
    """Return v, the residual C v - s z^(-power), its second term, and vᵀ C v."""
    v = unit * z
    # Solutions are below e^300, but a step that is too long could overflow.
    wanted = unit / z if power == 1 else unit * np.exp((-power * np.log(z)).clip(-300, 300))
    met = cosines @ v
    return v, met - wanted, wanted, float(v @ met)


@np.errstate(all="ignore")
def limit_norm(weights: Tensor, gramian: Tensor, max_norm: float) -> Tensor:
    """Scale the weights down to a gradient of norm `max_norm` at most; 0 means no limit."""
    w = weights.numpy()
    length = sqrt(max(float(w @ gramian.numpy() @ w), 0.0)) if max_norm else 0.0
    return torch.from_numpy(w * (max_norm / length)) if length > max_norm else weights


def project_on_simplex(point: Array) -> Array:
    """Return the nearest point with entries >= 0 and the sum 1."""
    values = point.tolist()  # plain numbers are faster than arrays for a few tasks
    largest = max(values)  # subtracted, as entries may be far above 1
    total, excess = 0.0, 0.0
    for index, value in enumerate(sorted(values, reverse=True), 1):
        total += value - largest
        if value - largest <= (total - 1) / index:
            break
        excess = (total - 1) / index
    return np.maximum(point - largest - excess, 0.0)
