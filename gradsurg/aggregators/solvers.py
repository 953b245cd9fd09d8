"""Exact solvers of the T x T problems of aggregators, in float64, on the gradients' cosines.

Everywhere, `cosines` is C = D⁻¹ G D⁻¹ with D = diag(norms), the rows u_i = g_i / |g_i| are of
length one, and an answer v means the gradient Σ v_i u_i: the weights of the rows are v / norms.
Norms that differ by 1e6 cost no digits.

What a Gramian cannot tell from zero is zero: an eigenvalue of C under RANK times the largest, and
the square of a convex combination of unit rows under RANK. That is about what float32 leaves of it.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from math import isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
General = Callable[[Array, Array], Array]
Pair = Callable[[float, float, float], tuple[float, float]]

RANK = 1e-6
TOLERANCE = 1e-12
EXCHANGES = 8  # blocks that are exchanged before variables are taken one at a time
NEWTON_STEPS = 200
FARTHER = 4.0  # one power of a bargain is as many times the one before
TINY = 1e-30  # of the largest: as good as nothing
REMEMBERED = 16  # Gramians about which several aggregators are asked


class NotConverged(ArithmeticError):
    """A solver did not reach its solution; `residual` says how far it came."""

    def __init__(self, problem: str, residual: float) -> None:
        self.residual = residual
        super().__init__(f"{problem} was not solved: a relative residual of {residual:.1e} is left")


def weights_of(
    gramian: Tensor, general: General, pair: Pair | None = None, idle: float | None = 0.0
) -> Tensor:
    """The weights (T,) of the rows: v of `general(cosines, norms)`, divided by the norms.

    `pair(cosine, norm, norm)` is the closed form for two rows. Rows of norm zero are left out and
    weigh `idle`, or share the whole weight if that is None; NaN or infinity anywhere in G makes
    every weight NaN.
    """
    if len(gramian) == 2 and pair is not None:
        (first, inner), (_, second) = gramian.tolist()
        if first > 0 and second > 0 and isfinite(first + second + inner):
            norm, other = sqrt(first), sqrt(second)
            v = pair(max(-1.0, min(1.0, inner / norm / other)), norm, other)
            return torch.from_numpy(np.array([v[0] / norm, v[1] / other]))
    count = len(gramian)
    rows = _directions(gramian.double().numpy().tobytes(), count)
    if rows is None:
        return torch.full((count,), torch.nan, dtype=torch.float64)
    alive, norms, cosines = rows
    if len(norms) == count:
        return torch.from_numpy(general(cosines, norms) / norms)
    if idle is None:
        return torch.from_numpy(~alive / (~alive).sum())
    weights = np.full(count, idle)
    if len(norms):
        weights[alive] = general(cosines, norms) / norms
    return torch.from_numpy(weights)


@lru_cache(maxsize=REMEMBERED)
def _directions(gramian: bytes, count: int) -> tuple[NDArray[np.bool_], Array, Array] | None:
    """Which rows are not zero, with their norms and cosines; None if a number is not finite.

    All that are given the same share what is returned: nobody may write to it.
    """
    matrix = np.frombuffer(gramian).reshape(count, count)
    if not np.isfinite(matrix).all():
        return None
    norms = np.sqrt(matrix.diagonal())
    alive = norms > 0
    if not alive.all():
        norms, matrix = norms[alive], matrix[np.ix_(alive, alive)]
    cosines = cosines_of(matrix, norms)
    for array in (alive, norms, cosines):
        array.flags.writeable = False
    return alive, norms, cosines


def cosines_of(matrix: Array, norms: Array) -> Array:
    return (matrix / norms / norms[:, None]).clip(-1.0, 1.0)


def factor(matrix: Array, tolerance: float = RANK) -> Array:
    """A (T, rank) with A Aᵀ = the matrix, without its eigenvalues under tolerance * the largest."""
    values, vectors = _eigen(matrix.tobytes(), len(matrix))
    kept = values > tolerance * values[-1]
    return vectors[:, kept] * np.sqrt(values[kept])


@lru_cache(maxsize=2 * REMEMBERED)
def _eigen(matrix: bytes, count: int) -> tuple[Array, Array]:
    """Its eigenvalues, from the least on, and eigenvectors."""
    values, vectors = np.linalg.eigh(np.frombuffer(matrix).reshape(count, count))
    values.flags.writeable = vectors.flags.writeable = False
    return values, vectors


def equiangular(cosines: Array) -> tuple[Array, Array]:
    """v = C⁺ 1, the direction that has the same cosine to all rows, and C v.

    C v is 1 where the rows are independent; else as near to it as they let it be, with the
    shortest such v.
    """
    values, vectors = _eigen(cosines.tobytes(), len(cosines))
    kept = values > RANK * values[-1]
    vectors = vectors[:, kept]
    sums = vectors.sum(0)
    return vectors @ (sums / values[kept]), vectors @ sums


def onto_dual_cone(cosines: Array, targets: Array) -> Array:
    """Each target (one a row, as coefficients of the unit rows) nearest to it with u_i · d >= 0."""
    scale = np.abs(targets).max(1, keepdims=True)
    return targets + nonnegative(cosines, -targets @ cosines, scale)


def project_mean_of_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """What is nearest to the mean with g_i · d >= 0 for both."""
    first, second = norm / 2, other / 2
    if (inner := first + cosine * second) < 0:
        return first - inner, second
    if (inner := second + cosine * first) < 0:
        return first, second - inner
    return first, second


def shortest(cosines: Array, norms: Array) -> Array:
    """The shortest vector of the convex hull of the rows.

    With a = 1 / norms it is min vᵀ C v for v >= 0, aᵀ v = 1: a multiple of what minimizes
    vᵀ C v + (aᵀ v - 1)² for v >= 0.
    """
    a = norms.min() / norms
    v = nonnegative(cosines + a[:, None] * a, a[None], np.ones((1, 1)))[0]
    return v / (v / norms).sum()


def nonnegative(matrix: Array, linear: Array, scale: Array) -> Array:
    """For each row b of `linear`, y >= 0 that minimizes yᵀ Q y / 2 - bᵀ y; b in the range of Q.

    `scale` (a column) is the size of what b is a difference of: rounding is measured by it.

    Exchanges of whole blocks (Kim and Park, SIAM J. Sci. Comput. 2011, algorithm 2), for all rows
    at once. Where these do not end at a solution, rows are solved one after the other by Lawson
    and Hanson's algorithm, which a singular Q does not trouble.
    """
    eye = np.eye(len(matrix))
    free = linear > 0
    y = np.zeros_like(linear)
    wrong = free
    for _ in range(EXCHANGES):
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
        # Far more than b can ask of independent rows: those of this block are not.
        wrong |= ~(np.abs(y) <= 1e4 * scale)
        free = free ^ wrong
    rows = factor(matrix, np.finfo(float).eps)
    for index in np.flatnonzero(wrong.any(1)):
        target = np.linalg.lstsq(rows, linear[index], rcond=None)[0]
        outside = float(np.abs(rows @ target - linear[index]).max() / scale[index, 0])
        if outside > 1e-4:  # more than the rounding of G can do
            raise NotConverged("a problem without a bound", outside)
        y[index] = _one_at_a_time(rows, target, float(scale[index, 0]))
    return y.clip(0)


def _one_at_a_time(rows: Array, target: Array, scale: float) -> Array:
    """y >= 0 that minimizes |rowsᵀ y - target| (Lawson and Hanson 1974, algorithm NNLS)."""
    y = np.zeros(len(rows))
    size = max(sqrt(target @ target), scale)
    free = np.zeros(len(rows), dtype=bool)
    barred = free.copy()
    worst = 0.0
    for _ in range(10 * len(rows)):
        slope = rows @ (target - y @ rows)
        slope[free] = 0.0
        worst = float(slope.max(initial=0.0))
        slope[barred] = 0.0
        enters = slope.argmax()
        if slope[enters] <= TOLERANCE * size:
            break
        free[enters] = True
        step = _fitted(rows, free, target)
        if step[enters] <= 0:  # rounding: it is a combination of those that are in
            free[enters] = False
            barred[enters] = True
            continue
        barred[:] = False
        while (leaving := free & (step <= 0)).any():
            y += np.min(y[leaving] / (y[leaving] - step[leaving])) * (step - y)
            free &= y > TOLERANCE * y.max()
            step = _fitted(rows, free, target)
        y = step
    if not worst <= 1e-6 * size:
        raise NotConverged("a projection onto the cone of the rows", worst / size)
    return y


def _fitted(rows: Array, free: NDArray[np.bool_], target: Array) -> Array:
    """The least squares over the free ones; the others are zero."""
    fitted = np.zeros(len(rows))
    fitted[free] = np.linalg.lstsq(rows[free].T, target, rcond=None)[0]
    return fitted


def bargained(cosines: Array, norms: Array, power: float) -> Array:
    """v of G w = w^(-power), w > 0: C v = k v^(-power) with k = norms^(power - 1).

    With v = s z and s = norms^((power - 1) / (power + 1)) it is C v = s z^(-power), where z is 1 if
    the rows are orthogonal: neither the scale of the rows nor the power takes it out of range. A
    power far from 1 is come to from one near 1, by FARTHER at a time, from solution to solution.

    If some v >= 0 has Σ v_i u_i = 0 there is no solution, no direction helps every row, and v is
    zero.
    """
    exponent = (power - 1) / (power + 1)
    scale = norms.max() if power > 1 else norms.min()
    unit = (norms / scale) ** exponent
    powers = [power]
    while not 1 / FARTHER <= powers[0] <= FARTHER:
        powers.insert(0, powers[0] * (FARTHER if power < 1 else 1 / FARTHER))
    z = _bargained_from(np.ones_like(unit), cosines, unit, powers[0])
    for before, now in pairwise(powers):
        if not z.any():
            break
        # Where z is small, z^(-power) is what is met already: it stays. Where it is large, z stays.
        z = np.where(z < 1, np.maximum(z, TINY) ** (before / now), z)
        z = _bargained_from(z, cosines, unit, now)
    return unit * z * scale**exponent


def bargain_of_pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """G w = 1 / w: the same share of each unit gradient; zero where they are opposite."""
    gain = 1 + cosine
    if gain <= 2 * RANK:
        return 0.0, 0.0
    return 1 / sqrt(gain), 1 / sqrt(gain)


def _bargained_from(z: Array, cosines: Array, unit: Array, power: float) -> Array:
    """z of C v = s z^(-power), v = s z, s = `unit`: zero if there is none.

    Damped Newton on the strictly convex vᵀ C v / 2 - Σ s_i² z_i^(1 - power) / (1 - power), or with
    s_i² log z_i at power 1.
    """
    v, slope, wanted, energy = _demand(cosines, z, unit, power)
    if energy > 0:  # start as far out as it is to be
        z = z * (float(v @ wanted) / energy) ** (1 / (power + 1))
        v, slope, wanted, energy = _demand(cosines, z, unit, power)
    change, root = np.inf, sqrt(max(power, 1.0))
    for _ in range(NEWTON_STEPS):
        if energy <= RANK * v.sum() ** 2:
            return np.zeros_like(v)
        curved = cosines.copy()
        curved.flat[:: len(v) + 1] += power * wanted / v  # on the diagonal
        try:
            step = -np.linalg.solve(curved, slope)
        except np.linalg.LinAlgError:
            break
        relative = step / v
        if power < 1 and (idle := z < TINY * z.max()).any():  # they must not hold up the rest
            relative[idle] = np.maximum(relative[idle], -0.9)
            step = relative * v
            change = float(np.abs(relative[~idle]).max())
        else:
            change = float(np.abs(relative).max())
        fall = -float(slope @ step)
        lost = power < 1 and fall <= 1e-15 * energy  # in rounding: what moves weighs little
        if change * root <= (1e-4 if lost else 1e-7):  # what is left is about its square
            return z + z * relative
        # 1 / (1 + decrement) is enough at power 1, where the function is self-concordant.
        share = 1.0 if power != 1 or fall < 0.05 else 1 / (1 + sqrt(fall))
        share = min(share, 0.9 / max(float(-relative.min()), 0.9))
        while True:
            ahead = z + share * z * relative
            v, slope, wanted, energy = _demand(cosines, ahead, unit, power)
            if float(slope @ step) <= fall / 2 or share < 1e-9 or lost:
                break
            share /= 2
        z = ahead
    raise NotConverged("G w = w^(-1/alpha)", change)


def _demand(
    cosines: Array, z: Array, unit: Array, power: float
) -> tuple[Array, Array, Array, float]:
    """v, the slope C v - s z^(-power), its second part, and vᵀ C v."""
    v = unit * z
    # No solution is at e^300, but a step that is too long can ask for more than a float holds.
    wanted = unit / z if power == 1 else unit * np.exp((-power * np.log(z)).clip(-300, 300))
    met = cosines @ v
    return v, met - wanted, wanted, float(v @ met)


@np.errstate(all="ignore")
def limited(weights: Tensor, gramian: Tensor, max_norm: float) -> Tensor:
    """The weights of a gradient not longer than `max_norm`; 0 is no limit."""
    own = weights.numpy()
    length = sqrt(max(float(own @ gramian.numpy() @ own), 0.0)) if max_norm else 0.0
    return torch.from_numpy(own * (max_norm / length)) if length > max_norm else weights
