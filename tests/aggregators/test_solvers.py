"""Each solver gives the one exact solution: certified, or found by a slower and different way."""

import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from math import sqrt
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls

from gradsurg.aggregators import aligned_mtl, cagrad, solvers
from gradsurg.aggregators.base import Weighting
from gradsurg.aggregators.dual_proj import DualProj
from gradsurg.aggregators.imtlg import IMTLG
from gradsurg.aggregators.mgda import MGDA
from gradsurg.aggregators.solvers import NotConverged
from gradsurg.aggregators.upgrad import UPGrad
from tests.aggregators.inputs import COUNTS, RATIOS, Array, distance, gramian, ranks, rows

every_count = pytest.mark.parametrize("count", COUNTS)


def options(count: int) -> Iterator[tuple[int, float, int]]:
    """Ranks of that many rows, ratios of their norms, and seeds."""
    return product(ranks(count), RATIOS, range(2))


def parts(matrix: Array) -> tuple[Array, Array, Array]:
    """The cosines, the norms and the unit rows."""
    norms = np.linalg.norm(matrix, axis=1)
    return solvers.cosines_of(matrix @ matrix.T, norms), norms, matrix / norms[:, None]


@every_count
def test_the_shortest_is_no_longer_than_its_projection_on_any_row(
    count: int,
) -> None:
    """d is the shortest of the hull if and only if g_i · d >= |d|² for all i."""
    for rank, ratio, seed in options(count):
        matrix = rows(count, rank, ratio, seed, lean=seed % 2 / 2)
        cosines, norms, _ = parts(matrix)
        x = solvers.min_norm_in_hull(cosines, norms) / norms
        assert x.min() >= 0
        assert x.sum() == pytest.approx(1)
        d = x @ matrix
        length = np.linalg.norm(d)
        if length > 1e-6 * norms.min():
            assert (matrix @ d).min() >= length**2 * (1 - 1e-6)
        else:  # 0 is in the hull, to the digits that G has
            assert length <= 1e-7 * norms.min()


@every_count
def test_a_projection_onto_the_dual_cone_satisfies_the_optimality_conditions(
    count: int,
) -> None:
    """U d >= 0, d - target = Σ y_i u_i with y >= 0, and y_i > 0 only where u_i · d = 0."""
    for rank, ratio, seed in options(count):
        cosines, norms, unit = parts(rows(count, rank, ratio, seed, lean=seed % 2 / 2))
        targets = np.concatenate([np.eye(count), norms[None] / norms.max()])
        v = solvers.project_onto_dual_cone(cosines, targets)
        y, inner = v - targets, v @ unit @ unit.T
        assert y.min() >= 0
        assert inner.min() >= -1e-9
        # `inner` is rounded as the largest y_i is: in the hundreds where rows nearly oppose
        assert np.abs(y * inner).max() <= 1e-9 * max(1, y.max())


@every_count
@pytest.mark.parametrize("c", [0.3, 0.9, 1.5])
def test_cagrads_direction_has_no_duality_gap(count: int, c: float) -> None:
    """min_i g_i · d is at most g_x · g_0 + c |g_0| |g_x| for every x of the simplex: equal here."""
    for rank, ratio, seed in options(count):
        matrix = rows(count, rank, ratio, seed, lean=seed % 2 / 2)
        cosines, norms, unit = parts(matrix)
        center = matrix.mean(0)
        radius = c * np.linalg.norm(center)
        v = cagrad._conflict_averse(cosines, norms, norms / count, c, still=False)
        d = v @ unit
        if radius < 1e-9 * norms.max():  # the gradients cancel
            assert np.linalg.norm(d) < 1e-7 * norms.max()
            continue
        assert np.linalg.norm(d - center) <= radius * (1 + 1e-9)
        x = (v - norms / count) / norms
        assert x.min() >= 0
        hull = x @ matrix / max(x.sum(), 1e-300)
        bound = hull @ center + radius * np.linalg.norm(hull)
        if np.linalg.norm(d - center) < radius * (1 - 1e-6):  # nothing helps all: this harms none
            assert np.abs((unit @ d).min()) <= 1e-9 * np.linalg.norm(center)
            assert (
                np.linalg.norm(solvers.min_norm_in_hull(cosines, np.ones(count)) @ unit) <= 1.1e-3
            )
        else:
            assert bound - (matrix @ d).min() <= 1e-7 * (abs(bound) + np.linalg.norm(hull) * radius)


@every_count
@pytest.mark.parametrize("power", [1e-6, 0.02, 0.3, 1.0, 3.0, 50.0, 1e6])
def test_bargaining_weights_solve_their_equation(count: int, power: float) -> None:
    for rank, ratio, seed in options(count):
        matrix = rows(count, rank, ratio, seed, lean=seed % 2 / 2)
        cosines, norms, unit = parts(matrix)
        v = solvers.bargain(cosines, norms, power)
        if v.any():
            assert v.min() > 0
            # G w = w^-power, each line over its norm; w^-power may be more than a float holds.
            wanted = np.exp(power * np.log(norms / v) - np.log(norms))
            rounding = 1e-12 * np.abs(cosines) @ v
            met = np.abs(unit @ (v @ unit) - wanted) <= 1e-6 * wanted + rounding
            assert (met | (v < 1e-25 * v.max())).all()  # or it weighs nothing
        else:  # no direction helps every row
            assert (
                np.linalg.norm(solvers.min_norm_in_hull(cosines, np.ones(count)) @ unit) <= 1.1e-3
            )


@pytest.mark.parametrize("seed", range(10))
def test_nonnegative_least_squares_agree_with_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    made = generator.standard_normal((8, 12))
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    target = generator.standard_normal(12)
    expected, _ = nnls(made.T, target)
    found = solvers.nonnegative_qp(made @ made.T, (made @ target)[None], np.ones((1, 1)))[0]
    np.testing.assert_allclose(found, expected, atol=1e-10)
    slow = solvers.nonnegative_least_squares(made, target, 1e-14)
    np.testing.assert_allclose(slow, expected, atol=1e-10)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [1.0, 30.0])
def test_cagrads_direction_agrees_with_scipy(seed: int, ratio: float) -> None:
    matrix = rows(5, 5, ratio, seed)
    cosines, norms, unit = parts(matrix)
    center = matrix.mean(0)
    radius = 0.5 * np.linalg.norm(center)

    def dual(x: Array) -> float:
        return float(x @ matrix @ center + radius * np.linalg.norm(x @ matrix))

    best = minimize(
        dual,
        np.full(5, 0.2),
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    hull = best.x @ matrix
    expected = center + radius * hull / np.linalg.norm(hull)
    found = cagrad._conflict_averse(cosines, norms, norms / 5, 0.5, still=False) @ unit
    assert (matrix @ found).min() >= (matrix @ expected).min() - 1e-9 * norms.max() ** 2
    assert distance(found, expected) < 1e-2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ratio", [1, 30, 1000, 10**6])
def test_the_solvers_agree_with_fractions_over_all_active_sets(seed: int, ratio: int) -> None:
    generator = np.random.default_rng([seed, ratio])
    integers = generator.integers(-9, 10, (3, 4)) * np.array([1, 1, ratio])[:, None]
    matrix = [[Fraction(int(entry)) for entry in row] for row in integers]
    if not all(any(row) for row in matrix):
        matrix[0][0] += 20
    plain = np.array([[float(entry) for entry in row] for row in matrix])
    cosines, norms, unit = parts(plain)
    shortest = solvers.min_norm_in_hull(cosines, norms) @ unit
    expected = exactly_shortest(matrix)
    assert np.abs(shortest - expected).max() <= 1e-9 * norms.min()
    mean = [sum(column, Fraction()) / 3 for column in zip(*matrix, strict=True)]
    projected = solvers.project_onto_dual_cone(cosines, norms[None] / 3)[0] @ unit
    assert np.abs(projected - exactly_projected(matrix, mean)).max() <= 1e-9 * norms.max()


def exactly_shortest(matrix: list[list[Fraction]]) -> Array:
    """The shortest vector of the hull: the shortest of the affine hull of some independent rows."""
    best = None
    for size in range(1, len(matrix) + 1):
        for chosen in combinations(matrix, size):
            first, others = chosen[0], [minus(row, chosen[0]) for row in chosen[1:]]
            shares = solved(
                [[inner(a, b) for b in others] for a in others], [-inner(a, first) for a in others]
            )
            if shares is None or min(shares, default=0) < 0 or sum(shares) > 1:
                continue
            point = plus(first, shares, others)
            if best is None or inner(point, point) < inner(best, best):
                best = point
    assert best is not None
    return np.array([float(entry) for entry in best])


def exactly_projected(matrix: list[list[Fraction]], target: list[Fraction]) -> Array:
    """The nearest with nonnegative products: the target made orthogonal to some rows."""
    best = None
    for size in range(len(matrix) + 1):
        for chosen in combinations(matrix, size):
            y = solved(
                [[inner(a, b) for b in chosen] for a in chosen],
                [-inner(a, target) for a in chosen],
            )
            if y is None:
                continue
            point = plus(target, y, list(chosen))
            if min(inner(row, point) for row in matrix) < 0:
                continue
            apart = minus(point, target)
            if best is None or inner(apart, apart) < inner(best[1], best[1]):
                best = point, apart
    assert best is not None
    return np.array([float(entry) for entry in best[0]])


def inner(a: list[Fraction], b: list[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction())


def minus(a: list[Fraction], b: list[Fraction]) -> list[Fraction]:
    return [x - y for x, y in zip(a, b, strict=True)]


def plus(
    start: list[Fraction], shares: list[Fraction], others: list[list[Fraction]]
) -> list[Fraction]:
    for share, other in zip(shares, others, strict=True):
        start = [x + share * y for x, y in zip(start, other, strict=True)]
    return start


def solved(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """By Gauss and Jordan; None if the matrix is singular."""
    table = [[*row, end] for row, end in zip(matrix, right, strict=True)]
    for index in range(len(table)):
        pivot = next((row for row in range(index, len(table)) if table[row][index]), None)
        if pivot is None:
            return None
        table[index], table[pivot] = table[pivot], table[index]
        table[index] = [entry / table[index][index] for entry in table[index]]
        for row in range(len(table)):
            if row != index:
                share = table[row][index]
                table[row] = [a - share * b for a, b in zip(table[row], table[index], strict=True)]
    return [row[-1] for row in table]


def test_a_solver_that_does_not_converge_raises_with_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opposite = np.array([[1.0, -1.0], [-1.0, 1.0]])
    with pytest.raises(NotConverged, match=r"without a bound.* residual 1\.0e\+00") as caught:
        solvers.nonnegative_qp(opposite, np.array([[1.0, 1.0]]), np.ones((1, 1)))
    assert isinstance(caught.value, ArithmeticError)
    assert caught.value.residual == pytest.approx(1)
    cosines, norms, _ = parts(rows(8, 8, 30.0, 0))
    monkeypatch.setattr(solvers, "NEWTON_STEPS", 2)
    with pytest.raises(NotConverged, match=r"G w = w\^"):
        solvers.bargain(cosines, norms, 1.0)


@pytest.mark.parametrize("seed", [1049, 1565, 2942, 3371, 4490, 6605])
def test_bargaining_of_nearly_opposite_rows_of_very_different_norms_ends(seed: int) -> None:
    """Newton's last steps are lost in rounding; without a solution in float32 all is zero."""
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((2 + seed % 3, 4))
    distance = 10 ** -random.uniform(4, 7)
    matrix[1] = -matrix[0] + distance * random.standard_normal(4)
    matrix *= 10.0 ** (-7 * random.integers(0, 2, (len(matrix), 1)))
    cosines, norms, unit = parts(matrix)
    power = 1 / 0.3
    v = solvers.bargain(cosines, norms, power)
    if not v.any():
        assert np.linalg.norm(unit[0] + unit[1]) ** 2 / 4 <= solvers.RANK
        return
    assert (v > 0).all()
    products, wanted = cosines @ v, norms ** (power - 1) * v**-power
    lost = 1e-14 * (np.abs(cosines) @ v)
    assert (np.abs(products - wanted) <= 1e-5 * wanted + lost).all()


@pytest.mark.parametrize("solver", ["_block_pivoting", "exchanges"])
def test_the_slow_algorithms_give_the_result_of_the_fast_ones(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    for seed in range(5):
        cosines, norms, unit = parts(rows(6, 6, 30.0, seed))
        mean = norms / 6

        def answers(
            cosines: Array = cosines, norms: Array = norms, mean: Array = mean
        ) -> list[Array]:
            return [
                cagrad._conflict_averse(cosines, norms, mean, 0.5, still=False),
                solvers.min_norm_in_hull(cosines, norms),
                *solvers.project_onto_dual_cone(cosines, np.eye(6)),
            ]

        fast = answers()
        with monkeypatch.context() as patch:
            if solver == "_block_pivoting":
                patch.setattr(cagrad, "_block_pivoting", lambda *_: None)
            else:
                patch.setattr(solvers, "MAX_BLOCK_PIVOTS", 0)
            slow = answers()
        for one, two in zip(fast, slow, strict=True):
            assert distance(two @ unit, one @ unit) <= 1e-9


def test_rows_of_norm_zero_are_left_out_and_nan_is_everywhere() -> None:
    def ones(cosines: Array, norms: Array) -> Array:
        return norms * len(norms)

    matrix = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    weights = solvers.solve_weights(gramian(matrix), ones, idle=7.0)
    assert weights.tolist() == [2.0, 7.0, 2.0]
    matrix[0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        spoiled = gramian(matrix)
    assert torch.isnan(solvers.solve_weights(spoiled, ones)).all()


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("seed", range(15))
def test_solvers_converge_on_a_gramian_rounded_to_float32(count: int, seed: int) -> None:
    """Dependent rows make such a Gramian indefinite, and opposite ones a mean of rounding."""
    generator = np.random.default_rng(seed)
    for rank in (1, 2, count - 1):
        matrix = rows(count, rank, (1.0, 1e3)[seed % 2], seed, lean=seed % 3 / 2)
        cosines, norms, unit = parts(matrix)
        noise = 3e-8 * generator.standard_normal(cosines.shape)
        cosines = (cosines + noise + noise.T).clip(-1, 1)
        np.fill_diagonal(cosines, 1.0)
        each = solvers.project_onto_dual_cone(cosines, np.eye(count)) @ unit
        assert (each @ unit.T).min() >= -1e-4
        averse = cagrad._conflict_averse(cosines, norms, norms / count, 1.5, still=False) @ unit
        assert (unit @ averse).min() >= -1e-4 * norms.max()
        assert np.isfinite(solvers.bargain(cosines, norms, 1.0)).all()
        shortest = solvers.min_norm_in_hull(cosines, norms) @ unit
        assert np.linalg.norm(shortest) <= norms.min() * (1 + 1e-6)


def test_independent_rows_use_the_fast_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(cagrad, "_conflict_averse_rows", refused)
    monkeypatch.setattr(solvers, "nonnegative_least_squares", refused)
    for seed in range(20):
        cosines, norms, _ = parts(rows(8, 8, 30.0, seed))
        cagrad._conflict_averse(cosines, norms, norms / 8, 0.5, still=False)
        solvers.project_onto_dual_cone(cosines, np.eye(8))
        solvers.min_norm_in_hull(cosines, norms)


@pytest.mark.parametrize("scale", ["min", "median", "rmse"])
@pytest.mark.parametrize("norms", [(1.0, 1e12), (1e12, 1.0)])
def test_small_rows_keep_their_precision_beside_large_ones(
    scale: aligned_mtl.Scale, norms: tuple[float, float]
) -> None:
    shares = np.array([0.5, 0.5])
    found = aligned_mtl._aligned(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array(norms), shares, scale)
    with mpmath.workdps(60):
        first, second = map(mpmath.mpf, norms)
        matrix = mpmath.matrix([[first, 0], [0.9 * second, mpmath.sqrt(1 - 0.9**2) * second]])
        left, sigmas, _ = mpmath.svd_r(matrix)
        mixed = left * mpmath.diag([1 / sigma for sigma in sigmas]) * left.T * mpmath.matrix(shares)
        squares = sum(sigma**2 for sigma in sigmas) / 2
        size = {"min": sigmas[1], "median": sigmas[1], "rmse": mpmath.sqrt(squares)}[scale]
        exact = [float(norm * part * size) for norm, part in zip(norms, mixed, strict=True)]
    assert found == pytest.approx(exact, rel=1e-12)


def test_a_solver_gets_the_cosines_and_norms_of_the_nonzero_rows() -> None:
    rows = torch.randn(6, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gramians = [*(rows @ rows.mT), torch.diag(torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64))]
    for one in gramians:
        norms = one.diagonal().sqrt()
        safe = torch.where(norms > 0, norms, 1.0)
        wanted = (one / safe / safe[:, None]).sum(1)
        found = solvers.solve_weights(one, lambda cosines, norms: cosines.sum(1) * norms)
        torch.testing.assert_close(found, wanted)


def test_a_gramian_in_float32_is_solved_in_float64() -> None:
    matrix = gramian(np.array([[1.0, 0.0, 0.5], [-2.0, 1.0, 0.0], [0.0, -1.0, 3.0]]))
    found = UPGrad().weights(matrix.float())
    torch.testing.assert_close(found, UPGrad().weights(matrix.float().double()))


@pytest.mark.parametrize("kind", [UPGrad, DualProj, MGDA, IMTLG])
def test_the_closed_form_for_two_rows_equals_the_general_solver(
    kind: type[Weighting], monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = solvers.solve_weights

    def general(*args: Any, of_two: object = None, **others: Any) -> torch.Tensor:
        return solve(*args[:4], **others)

    cosines, lengths = (-0.999, -0.7, -0.01, 0.0, 0.3, 0.9, 0.999), (1e-9, 0.5, 1.0, 3.0, 1e9)
    for cosine, length, share in product(cosines, lengths, (0.5, 0.2)):
        own = kind() if kind is IMTLG else kind(preference=(share, 1 - share))
        matrix = np.array([[1.0, 0.0], [cosine * length, sqrt(1 - cosine**2) * length]])
        found = own.weights(gramian(matrix)).numpy()
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[kind.__module__], "solve_weights", general)
            wanted = own.weights(gramian(matrix)).numpy()
        assert found * [1, length] == pytest.approx(wanted * [1, length], rel=1e-9, abs=1e-18)
