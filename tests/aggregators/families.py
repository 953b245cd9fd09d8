"""Nearly dependent gradients, exact results for them, and the errors of aggregators.

Each family has 3 to 20 rows of 5 to 200 entries in float32 or float64, dependent up to a relative
noise of 1e-12 to 1e-4. Lengths, errors and changes are relative to the largest norm that the
update of the method can have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import mpmath as mp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext, combine_by_gramian
from tests.aggregators.cases import made

Array = NDArray[np.float64]
Exact = list[Any]  # Any: mpmath has no type of its numbers

NOISES = tuple(10.0**power for power in range(-12, -3))
DIGITS = 80
ZERO = mp.mpf(10) ** -50
MAX_EXACT_TASKS = 6
CAGRAD_C = 0.5


def _antiparallel(rng: np.random.Generator, count: int, width: int) -> Array:
    rows = rng.standard_normal((count, width))
    rows[1] = -rng.uniform(0.1, 10) * rows[0]
    return rows


def _constant_sum(rng: np.random.Generator, count: int, width: int) -> Array:
    rows = rng.standard_normal((count, width))
    rows[-1] = -rows[:-1].sum(0)
    return rows


def _twice(rng: np.random.Generator, count: int, width: int) -> Array:
    rows = rng.standard_normal((count, width))
    rows[1] = rows[0]
    return rows


def _low_rank(rng: np.random.Generator, count: int, width: int) -> Array:
    rank = int(rng.integers(1, min(count, width)))
    return rng.standard_normal((count, rank)) @ rng.standard_normal((rank, width))


def _strictly_weak(rng: np.random.Generator, count: int, width: int) -> Array:
    """Some positive combination of some rows is zero, and none of all rows."""
    shares, chosen = np.abs(rng.standard_normal(count)), rng.permutation(count)
    split = int(rng.integers(2, count))
    zero, positive = np.zeros((2, count))
    zero[chosen[:split]], positive[chosen[split:]] = shares[chosen[:split]], shares[chosen[split:]]
    others = rng.standard_normal((count, count - 2))
    basis = np.linalg.qr(np.column_stack([zero, positive, others]))[0]
    basis[:, 1] = positive / np.linalg.norm(positive)
    rank = int(rng.integers(2, min(count - 1, width) + 1))
    right = np.linalg.qr(rng.standard_normal((width, width)))[0]
    sizes = np.abs(rng.standard_normal(rank))
    return basis[:, 1 : rank + 1] * sizes @ right[:rank]


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "antiparallel": _antiparallel,
    "constant sum": _constant_sum,
    "twice": _twice,
    "low rank": _low_rank,
    "strictly weak": _strictly_weak,
}


def draw(family: str, seed: int, max_tasks: int = 20) -> tuple[Tensor, float]:
    """Return the rows of one draw, each with its own noise, and the noise."""
    rng = np.random.default_rng([sorted(FAMILIES).index(family), seed, max_tasks])
    count = int(rng.integers(3, max_tasks + 1))
    width = int(np.exp(rng.uniform(np.log(5), np.log(200.99))))
    noise = float(rng.choice(NOISES))
    rows = FAMILIES[family](rng, count, width)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows + noise / np.sqrt(width) * norms * rng.standard_normal(rows.shape)
    dtype = (torch.float32, torch.float64)[int(rng.integers(2))]
    return torch.from_numpy(rows).to(dtype), noise


def bound(name: str, rows: Tensor) -> float:
    """Return the largest norm that the update can have."""
    matrix = rows.double()
    match name:
        case "upgrad":
            return float(matrix.norm(dim=1).mean())
        case "dual_proj":
            return float(matrix.mean(0).norm())
        case "cagrad":
            return (1 + CAGRAD_C) * float(matrix.mean(0).norm())
        case "mgda":
            return float(matrix.norm(dim=1).min())
        case _:
            return 1.0  # max_norm of NashMTL and FairGrad


@dataclass
class Case:
    """The measured numbers of one method on one matrix; NaN if not measured."""

    length: float = np.nan
    changed: float = np.nan
    conflict: float = np.nan
    error: float = np.nan
    raised: bool = False
    nearly: bool = False  # CAGrad: as good as the exact update for the worst task


def measure(name: str, rows: Tensor, seed: int, exact: bool) -> Case:
    """Return the relative length, change under a permutation, conflict, and error if `exact`."""
    aggregator, limit = made(name), bound(name, rows)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
    try:
        results = [
            combine_by_gramian(aggregator, [part], aggregator.init(len(part)), AggregatorContext())
            for part in (rows, rows[order])
        ]
    except ArithmeticError:
        return Case(raised=True)
    update, permuted = (result.grads[0].double() for result in results)
    limit = max(limit, 1e-300)
    matrix = rows.double()
    conflict = -float((matrix @ update / matrix.norm(dim=1)).min()) / limit
    case = Case(
        length=float(update.norm()) / limit,
        changed=float((update - permuted).norm()) / limit,
        conflict=max(conflict, 0.0),
    )
    if exact:
        case.error, case.nearly = error_of(name, rows, update.numpy(), limit)
    return case


def error_of(name: str, rows: Tensor, update: Array, limit: float) -> tuple[float, bool]:
    """Return the distance to the exact update, and whether another CAGrad is as good.

    Where the update of CAGrad is not the exact one, but as good for the worst task up to rounding
    of the rows to their dtype, the distance does not count and is NaN.
    """
    exact = EXACT[name](rows.double().numpy())
    error = float(np.linalg.norm(update - exact)) / limit
    if error > 1e-3 and name == "cagrad" and _is_nearly_optimal(rows, update, exact):
        return np.nan, True
    return error, False


def _is_nearly_optimal(rows: Tensor, update: Array, exact: Array) -> bool:
    """Whether the worst task does as well as with the exact update, up to rounding of the rows."""
    matrix = rows.double().numpy()
    center = matrix.mean(0)
    radius = CAGRAD_C * np.linalg.norm(center)
    worst, best = (float((matrix @ d).min()) for d in (update, exact))
    rounding = 8 * torch.finfo(rows.dtype).eps * float(np.linalg.norm(matrix, axis=1).max())
    inside = bool(np.linalg.norm(update - center) <= radius * (1 + 1e-6))
    return inside and worst >= best - rounding * float(np.linalg.norm(exact))


# Exact solutions, in 80 digits, by enumeration of all sets of active rows.


def _dot(a: Exact, b: Exact) -> Any:  # Any: see Exact
    return mp.fdot(a, b)


class _Problem:
    """Rows in 80 digits, with the inverse of the Gramian of each independent subset."""

    def __init__(self, matrix: Array) -> None:
        self.rows = [[mp.mpf(float(entry)) for entry in row] for row in matrix]
        self.count = len(self.rows)
        self.gramian = [[_dot(a, b) for b in self.rows] for a in self.rows]
        self.inverses: dict[tuple[int, ...], Any] = {(): None}
        self.sizes = [mp.sqrt(self.gramian[i][i]) for i in range(self.count)]
        for size in range(1, self.count + 1):
            for chosen in combinations(range(self.count), size):
                if chosen[:-1] in self.inverses:
                    self._add(chosen)

    def _add(self, chosen: tuple[int, ...]) -> None:
        unit = mp.matrix(
            [[self.gramian[i][j] / self.sizes[i] / self.sizes[j] for j in chosen] for i in chosen]
        )
        try:
            lower = mp.cholesky(unit)
        except (ValueError, ZeroDivisionError):
            return
        if min(lower[i, i] for i in range(len(chosen))) < mp.mpf(10) ** -30:
            return
        inverse = mp.inverse(unit)
        self.inverses[chosen] = [
            [inverse[a, b] / self.sizes[i] / self.sizes[j] for b, j in enumerate(chosen)]
            for a, i in enumerate(chosen)
        ]

    def weights(self, chosen: tuple[int, ...], right: Exact) -> Exact:
        """Return the solution of the Gramian of some rows."""
        return [_dot(line, right) for line in self.inverses[chosen]] if chosen else []

    def products(self, weights: Exact) -> Exact:
        return [_dot(line, weights) for line in self.gramian]

    def combined(self, weights: Exact) -> Array:
        columns = zip(*self.rows, strict=True)
        return np.array([float(_dot(weights, column)) for column in columns])

    def projected(self, target: Exact) -> Exact:
        """Return the weights of the projection of a combination onto the dual cone."""
        inner = self.products(target)
        size = mp.sqrt(abs(_dot(target, inner)))
        for chosen in self.inverses:
            y = self.weights(chosen, [-inner[i] for i in chosen])
            if any(value < 0 for value in y):
                continue
            weights = list(target)
            for i, value in zip(chosen, y, strict=True):
                weights[i] += value
            slack = self.products(weights)
            if all(s >= -ZERO * size * n for s, n in zip(slack, self.sizes, strict=True)):
                return weights
        raise AssertionError("no active set")

    def averse(self, c: float) -> Exact:
        mean = [mp.mpf(1) / self.count] * self.count
        q = self.products(mean)
        square = c**2 * _dot(mean, q)
        best, weights = None, mean
        for chosen in [chosen for chosen in self.inverses if chosen]:
            growth = self.weights(chosen, [mp.mpf(1)] * len(chosen))
            start = self.weights(chosen, [q[i] for i in chosen])
            a, b = sum(growth), sum(start)
            rest = _dot(start, [q[i] for i in chosen]) - square
            if b * b - a * rest < 0:
                continue
            t = (b + mp.sqrt(b * b - a * rest)) / a
            y = [t * g - s for g, s in zip(growth, start, strict=True)]
            if any(value < 0 for value in y) or (best is not None and t <= best):
                continue
            candidate = list(mean)
            for i, value in zip(chosen, y, strict=True):
                candidate[i] += value
            slack = [p - t for p in self.products(candidate)]
            size = mp.sqrt(square)
            if all(s >= -ZERO * size * n for s, n in zip(slack, self.sizes, strict=True)):
                best, weights = t, candidate
        if best is not None and best > ZERO:
            return weights
        harmless = self.projected(mean)
        moved = [h - m for h, m in zip(harmless, mean, strict=True)]
        inside = _dot(moved, self.products(moved)) <= square
        return harmless if inside or best is None else weights


def _exactly(solve: Callable[[_Problem], Exact]) -> Callable[[Array], Array]:
    def solved(matrix: Array) -> Array:
        with mp.workdps(DIGITS):
            problem = _Problem(matrix)
            return problem.combined(solve(problem))

    return solved


def _exact_upgrad(problem: _Problem) -> Exact:
    count = problem.count
    each = [problem.projected([mp.mpf(int(i == j)) for j in range(count)]) for i in range(count)]
    return [sum(column) / count for column in zip(*each, strict=True)]


EXACT: dict[str, Callable[[Array], Array]] = {
    "dual_proj": _exactly(lambda p: p.projected([mp.mpf(1) / p.count] * p.count)),
    "upgrad": _exactly(_exact_upgrad),
    "cagrad": _exactly(lambda p: p.averse(CAGRAD_C)),
}


def cases(name: str, family: str, draws: int, exact: int, seed: int) -> Iterator[Case]:
    """Yield the numbers of `draws` matrices, and of `exact` small ones with their errors."""
    for number in range(draws):
        yield measure(name, draw(family, seed + number)[0], number, exact=False)
    for number in range(exact if name in EXACT else 0):
        rows = draw(family, seed + number, MAX_EXACT_TASKS)[0]
        yield measure(name, rows, number, exact=True)
