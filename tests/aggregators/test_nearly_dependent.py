"""Nearly dependent gradients: bounds, independence of the order, and distance to exact updates."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators import rows as row_algebra
from gradsurg.aggregators.base import AggregatorContext, combine_by_gramian
from gradsurg.aggregators.rows import (
    SolvedOnRows,
    combine_safely,
    gramian_of,
    triangular_factor,
)
from gradsurg.aggregators.solvers import NotConverged, is_nearly_dependent
from tests.aggregators.cases import made
from tests.aggregators.families import EXACT, FAMILIES, bound, cases, draw
from tests.aggregators.inputs import rows

METHODS = ("upgrad", "dual_proj", "cagrad")


def check(name: str, family: str, draws: int, exact: int, seed: int) -> None:
    results = list(cases(name, family, draws, exact, seed))
    assert not any(case.raised for case in results)
    assert max(case.length for case in results) <= 1 + 1e-3
    assert max(case.changed for case in results) <= 1e-4
    errors = [case.error for case in results if not np.isnan(case.error)]
    assert max(errors, default=0.0) <= 1e-3
    if name != "cagrad":
        assert max(case.conflict for case in results) <= 1e-3
        assert len(errors) == exact


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_updates_meet_their_bounds_in_every_family(name: str, family: str) -> None:
    check(name, family, draws=10, exact=1, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_updates_meet_their_bounds_in_many_draws(name: str, family: str) -> None:
    check(name, family, draws=150, exact=8, seed=10_000)


def opposite(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows g, -a g and h, each with its own rounding."""
    rng = np.random.default_rng(seed)
    g, h = rng.standard_normal((2, 5))
    matrix = np.stack([g, -rng.uniform(0.1, 10) * g, h])
    return torch.from_numpy(matrix * (1 + 3e-8 * rng.standard_normal((3, 5)))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposite_gradients_up_to_rounding(dtype: torch.dtype) -> None:
    for seed in range(25):
        matrix = opposite(seed, dtype)
        for name in METHODS:
            update = made(name)(matrix)
            assert float(update.double().norm()) <= bound(name, matrix) * (1 + 1e-6)
            for order in ([2, 0, 1], [1, 2, 0]):
                assert torch.equal(made(name)(matrix[order]), update)


def test_many_stationary_tasks_give_the_projection_of_the_mean() -> None:
    """20 x 10 of rank 5, of which some rows have a positive combination that is zero."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        shares = np.abs(rng.standard_normal(8))
        made_of = rng.standard_normal((20, 5)) + np.eye(1, 5) * 2
        made_of[7] = -(shares[:7] @ made_of[:7]) / shares[7]
        matrix = torch.from_numpy(made_of @ rng.standard_normal((5, 10))).float()
        exact = matrix.double().numpy()
        unit = exact / np.linalg.norm(exact, axis=1, keepdims=True)
        length = nnls(unit.T, -exact.mean(0), maxiter=1000)[1]
        for order in (range(20), range(19, -1, -1)):
            update = made("dual_proj")(matrix[list(order)])
            assert float(update.norm()) == pytest.approx(length, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", [gs.UPGrad, gs.DualProj])
def test_a_preference_follows_its_task_where_rows_are_sorted(kind: type[SolvedOnRows]) -> None:
    preference = (0.1, 0.7, 0.2)
    for seed in range(10):
        matrix = opposite(seed, torch.float64)
        update = kind(preference=preference)(matrix)
        exact = matrix.numpy()
        unit = exact / np.linalg.norm(exact, axis=1, keepdims=True)

        def projected(target: np.ndarray, unit: np.ndarray = unit) -> np.ndarray:
            return target + nnls(unit.T, -target)[0] @ unit

        if kind is gs.UPGrad:
            parts = [share * projected(row) for share, row in zip(preference, exact, strict=True)]
            expected = np.sum(parts, axis=0)
        else:
            expected = projected(preference @ exact)
        np.testing.assert_allclose(update.numpy(), expected, rtol=1e-5, atol=1e-6)
        for order in ([2, 0, 1], [1, 0, 2]):
            permuted = kind(preference=[preference[index] for index in order])(matrix[order])
            torch.testing.assert_close(permuted, update)


def test_a_triangular_factor_has_the_products_of_the_rows() -> None:
    matrix = torch.randn(4, 70_000, generator=torch.Generator().manual_seed(0)).double()
    blocks = [matrix[:, :66_000], matrix[:, 66_000:].float()]
    order = torch.tensor([2, 0, 3, 1])
    factor = triangular_factor(blocks, order)
    assert factor.shape == (4, 4)
    torch.testing.assert_close(factor @ factor.T, gramian_of(blocks)[order][:, order])
    assert triangular_factor([matrix[:, :2]], order).shape == (4, 2)


def test_independent_rows_are_solved_on_the_gramian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_algebra, "triangular_factor", None)
    for count in (2, 3, 8):
        matrix = torch.from_numpy(rows(count, count, 1e3, seed=0))
        for name in METHODS:
            made(name)(matrix)
    assert is_nearly_dependent(gramian_of([opposite(0)]))
    with pytest.raises(TypeError):
        made("upgrad")(opposite(0))


@pytest.mark.parametrize("name", METHODS)
def test_weights_of_a_gramian_alone_stay_within_the_bound(name: str) -> None:
    """Where the rows are not known: the sum is not too long, on the rows too."""
    for seed in range(40):
        matrix = opposite(seed, torch.float64)
        gramian = gramian_of([matrix])
        weights = made(name).weights(gramian)
        update = combine_safely([matrix], weights, gramian)[0]
        assert float(update.norm()) <= bound(name, matrix) * (1 + 1e-3)


def test_a_row_of_zeros_changes_nothing_but_the_mean() -> None:
    matrix = opposite(3, torch.float64)
    with_zero = torch.cat([matrix, torch.zeros(1, 5, dtype=torch.float64)])
    for name in ("upgrad", "dual_proj"):
        torch.testing.assert_close(made(name)(with_zero), made(name)(matrix) * 3 / 4)


@pytest.mark.parametrize("name", METHODS)
def test_blocks_and_a_loss_scale_change_nothing(name: str) -> None:
    matrix, aggregator = opposite(1), made(name)
    whole = combine_by_gramian(aggregator, [matrix], {}, AggregatorContext())
    blocks = [matrix[:, :2] * 1024, matrix[:, 2:] * 1024]
    split = combine_by_gramian(aggregator, blocks, {}, AggregatorContext(), scale=1024.0)
    assert whole.on_rows
    assert split.on_rows
    torch.testing.assert_close(torch.cat(split.grads) / 1024, whole.grads[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_larger_ridge_is_tried_where_the_first_fails(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, aggregator = opposite(2, dtype), made(name)
    if dtype == torch.bfloat16:
        matrix[1] = -2 * matrix[0]
    exact = aggregator(matrix)
    of_rows = type(aggregator).weights_of_rows

    def first_fails(
        self: SolvedOnRows, rows: Tensor, order: Tensor, ridge: float, least: float
    ) -> Tensor:
        weights = of_rows(self, rows, order, ridge, least)
        return weights * 1e3 if ridge < 1e-11 else weights  # too long

    monkeypatch.setattr(type(aggregator), "weights_of_rows", first_fails)
    for scale in (1.0, 2.0**24):
        result = combine_by_gramian(aggregator, [matrix * scale], {}, AggregatorContext(), scale)
        assert result.fell_back
        torch.testing.assert_close(
            result.grads[0] / scale, exact, rtol=max(1e-4, torch.finfo(dtype).eps), atol=1e-5
        )


def test_a_fallback_that_conflicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = opposite(2)

    def conflicting(
        self: SolvedOnRows, rows: Tensor, order: Tensor, ridge: float, least: float
    ) -> Tensor:
        if ridge == row_algebra.RIDGES[0]:
            raise NotConverged("a test", 1.0)
        return torch.tensor([0.0, 1e-2, 0.0], dtype=torch.float64)

    for name in METHODS:
        monkeypatch.setattr(type(made(name)), "weights_of_rows", conflicting)
    with pytest.raises(NotConverged, match="nearly dependent rows"):
        made("dual_proj")(matrix)
    assert made("cagrad")(matrix).any()  # c < 1: conflicts are allowed


def test_exact_updates_satisfy_the_optimality_conditions() -> None:
    for seed in range(3):
        matrix, _ = draw("antiparallel", seed, 4)
        exact = EXACT["dual_proj"](matrix.double().numpy())
        mean = matrix.double().mean(0).numpy()
        assert np.linalg.norm(exact) <= np.linalg.norm(mean) * (1 + 1e-12)
        assert (matrix.double().numpy() @ exact).min() >= -1e-12
        assert abs(exact @ (exact - mean)) <= 1e-9
