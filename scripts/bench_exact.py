"""Exact, slow reference solutions of aggregators, to measure errors against.

Each takes a float64 matrix (T, P); that of PCGrad also the orders of the tasks.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]


def unit_of(matrix: Array) -> Array:
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def pcgrad(matrix: Array, met: list[list[int]]) -> Array:
    done = matrix.copy()
    for i, order in enumerate(met):
        for j in order:
            if j != i and (inner := done[i] @ matrix[j]) < 0:
                done[i] -= inner / (matrix[j] @ matrix[j]) * matrix[j]
    return done.sum(0)


def upgrad(matrix: Array, _: object) -> Array:
    unit, norms = unit_of(matrix), np.linalg.norm(matrix, axis=1)
    harmless = [row + nnls(unit.T, -row)[0] @ unit for row in unit]
    return norms @ np.array(harmless) / len(matrix)


def subsets(count: int) -> list[list[int]]:
    return [list(s) for k in range(1, count + 1) for s in combinations(range(count), k)]


def reduced(matrix: Array) -> tuple[Array, Array]:
    """Return the rows in a basis of their span, and the basis."""
    basis, upper = np.linalg.qr(unit_of(matrix).T)
    return upper.T * np.linalg.norm(matrix, axis=1, keepdims=True), basis


def mgda(matrix: Array, _: object) -> Array:
    """Return the shortest convex combination, by enumeration of the faces of the simplex."""
    small, basis = reduced(matrix)
    best = None
    for chosen in subsets(len(matrix)):
        first, others = small[chosen[0]], small[chosen[1:]]
        apart = others - first
        # Columns of about one length: x in units of the rows.
        lengths = np.linalg.norm(apart, axis=1)
        x = -np.linalg.lstsq((apart / lengths[:, None]).T, first, rcond=None)[0] / lengths
        if len(x) and (x.min() < 0 or x.sum() > 1):
            continue
        point = first + x @ apart
        if best is None or point @ point < best @ best:
            best = point
    assert best is not None
    return basis @ best


def cagrad(matrix: Array, _: object) -> Array:
    """Return the best solution over all active sets, by the duality gap."""
    small, basis = reduced(matrix)
    unit, a = unit_of(small), 1 / np.linalg.norm(small, axis=1)
    center = small.mean(0)
    radius = 0.5 * np.linalg.norm(center)
    best = center, -np.inf
    for chosen in subsets(len(matrix)):
        inverse = np.linalg.pinv(unit[chosen])
        growth, start = inverse @ a[chosen], inverse @ unit[chosen] @ center
        # d = center + t growth - start, at the radius.
        roots = np.roots([growth @ growth, -2 * growth @ start, start @ start - radius**2])
        if abs(roots.imag).max() > 0:
            continue
        d = center + roots.real.max() * growth - start
        worst = (small @ d).min() if np.linalg.norm(d - center) <= radius * (1 + 1e-9) else -np.inf
        best = max(best, (d, worst), key=lambda pair: pair[1])
    for row in unit:
        d = center + radius * row
        best = max(best, (d, (small @ d).min()), key=lambda pair: pair[1])
    return basis @ best[0]


def imtlg(matrix: Array, _: object) -> Array:
    small, basis = reduced(matrix)
    direction = np.linalg.solve(unit_of(small), np.ones(len(small)))
    return basis @ (direction / np.linalg.solve(small.T, direction).sum())


def nash_mtl(matrix: Array, _: object) -> Array:
    """Return the solution of unit norm by a damped fixed-point iteration."""
    unit = unit_of(matrix)
    cosines = unit @ unit.T
    v = np.ones(len(matrix))
    for _ in range(100):
        slope = cosines @ v - 1 / v
        step = np.linalg.solve(cosines + np.diag(1 / v**2), slope)
        v = v - step / (1 + np.sqrt(slope @ step))
    assert np.abs(cosines @ v * v - 1).max() < 1e-12
    d = v @ unit
    return d / np.linalg.norm(d)


def aligned_mtl(matrix: Array, _: object) -> Array:
    left, sigmas, right = np.linalg.svd(matrix, full_matrices=False)
    return sigmas[-1] * (left @ right).mean(0)


def con_fig(matrix: Array, _: object) -> Array:
    direction = np.linalg.pinv(unit_of(matrix)).sum(1)
    direction /= np.linalg.norm(direction)
    return (matrix @ direction).sum() * direction


EXACT: dict[str, Callable[[Array, list[list[int]]], Array]] = {
    "Mean": lambda matrix, _: matrix.mean(0),
    "PCGrad": pcgrad,
    "UPGrad": upgrad,
    "MGDA": mgda,
    "CAGrad": cagrad,
    "IMTLG": imtlg,
    "NashMTL": nash_mtl,
    "AlignedMTL": aligned_mtl,
    "ConFIG": con_fig,
}
