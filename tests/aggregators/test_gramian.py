"""Properties of every aggregator that needs the Gramian alone, and its edge cases."""

import pytest
import torch
from torch import Tensor

from gradsurg.aggregators import rows as row_algebra
from gradsurg.aggregators.base import (
    Aggregator,
)
from tests.aggregators.cases import made
from tests.aggregators.gramian_cases import STEMS, aggregators, by
from tests.aggregators.inputs import distance, rows


def lengths(matrix: Tensor) -> Tensor:
    return matrix.norm(dim=1)


def apart(one: Tensor, two: Tensor, matrix: Tensor) -> float:
    return float((one - two).norm() / lengths(matrix).max())


def expected_of_same(aggregator: Aggregator, g: Tensor, count: int) -> Tensor | None:
    """The result of identical tasks, by the docstrings."""
    match type(aggregator).__name__:
        case "PCGrad" | "GradVac" | "ConFIG":
            mean = getattr(aggregator, "reduction", "sum") == "mean"
            return g if mean else count * g
        case "CAGrad":
            share = 1 + aggregator.c
            return share * g / {"none": 1, "1+c": share, "1+c^2": 1}[aggregator.rescale]
        case "NashMTL" | "FairGrad":
            return None
        case _:
            return g


@aggregators()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_tasks(aggregator: Aggregator, dtype: torch.dtype) -> None:
    g = torch.from_numpy(rows(1, 1, 1.0, seed=0)[0]).to(dtype)
    for count in (2, 3, 8):
        if type(aggregator).__name__ == "Krum" and count < aggregator.num_byzantine + 3:
            continue
        result = by(aggregator, g.repeat(count, 1))
        expected = expected_of_same(aggregator, g, count)
        if expected is None:  # the direction, at a length of its own
            result, expected = result / result.norm(), g / g.norm()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@aggregators()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposite_tasks(aggregator: Aggregator, dtype: torch.dtype) -> None:
    g = torch.from_numpy(rows(1, 1, 1.0, seed=0)[0]).to(dtype)
    if type(aggregator).__name__ == "Krum":
        return
    for ratio in (1.0, 5.0):
        result = by(aggregator, torch.stack([g, -ratio * g]))
        if type(aggregator).__name__ == "CAGrad" and aggregator.c < 1:
            expected = (1 - aggregator.c) * (1 - ratio) / 2 * g  # along the mean, as far as c lets
        elif getattr(aggregator, "eps", 0) or type(aggregator).__name__ == "SDMGrad":
            continue
        else:
            match type(aggregator).__name__, getattr(aggregator, "target", None):
                case "PCGrad", "projected":
                    expected = -ratio * g
                case "AlignedMTL" | "GeometricMedian" | "CenteredClip", _:
                    expected = (1 - ratio) / 2 * g
                case _:
                    expected = torch.zeros_like(g)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@aggregators()
def test_one_task_and_zero_gradients(aggregator: Aggregator) -> None:
    name = type(aggregator).__name__
    matrix = torch.from_numpy(rows(4, 4, 3.0, seed=1))
    if name != "Krum":
        one = by(aggregator, matrix[:1])
        torch.testing.assert_close(one / one.norm(), matrix[0] / matrix[0].norm())
    zeros = torch.zeros_like(matrix)
    assert not by(aggregator, zeros).any()
    with_zero = torch.cat([matrix[:2], zeros[:1], matrix[2:]])
    result = by(aggregator, with_zero)
    assert result.isfinite().all()
    match name:
        case "MGDA":
            assert not result.any()
        case "IMTLG" | "ConFIG" | "NashMTL" | "FairGrad":  # left out, except for those that count T
            assert (
                distance(
                    (result / result.norm()).numpy(),
                    (by(aggregator, matrix) / by(aggregator, matrix).norm()).numpy(),
                )
                < 1e-9
            )
        case "UPGrad" | "DualProj" | "AlignedMTL":
            assert distance(result.numpy(), by(aggregator, matrix).numpy() * 4 / 5) < 1e-9
        case "CAGrad":
            mean = by(made("mean"), with_zero)
            assert float((result - mean).norm()) <= aggregator.c * float(mean.norm()) + 1e-9


def test_krum_refuses_too_few_tasks_by_name() -> None:
    matrix = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"Krum\(.*\) needs 3 tasks or more, found 2"):
        by(made("krum"), matrix)
    with pytest.raises(ValueError, match="needs 4 tasks or more, found 3"):
        by(made("krum", num_byzantine=1), torch.ones(3, 4))
    with pytest.raises(ValueError, match="needs 5 tasks or more, found 3"):
        by(made("krum", num_selected=5), torch.ones(3, 4))


def test_cagrad_with_a_zero_gradient_is_the_nearest_non_conflicting_direction() -> None:
    """The worst of the tasks is then the one that nothing helps: more is not asked for."""
    cagrad = made("cagrad", c=0.9)
    agreeing = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(by(cagrad, agreeing), agreeing.mean(0))
    matrix = torch.tensor([[1.0, 0.0], [-1.5, 1.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(by(cagrad, matrix), by(made("dual_proj"), matrix))


@pytest.mark.parametrize("width", [0, 7, 4096, 15_000])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 32, 49])
def test_a_gramian_in_pieces_is_the_gramian(
    monkeypatch: pytest.MonkeyPatch, count: int, width: int
) -> None:
    monkeypatch.setattr(row_algebra, "COLUMNS", 100)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(count, width, generator=generator, dtype=torch.float64) + 1
    for dtype, digits in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.float16, 1e-6)):
        given = matrix.to(dtype)
        exact = given.double() @ given.double().T
        torch.testing.assert_close(row_algebra.gramian_of([given]), exact, rtol=digits, atol=0.0)


def _dependent(count: int, width: int, seed: int) -> Tensor:
    """Rows in float32 of which one is nearly what the others make, of norms from 1 to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(count, width, generator=generator, dtype=torch.float64)
    matrix[-1] = 1e-3 * matrix[-1] - matrix[:-1].sum(0)
    lengths = torch.logspace(0, 6, count, dtype=torch.float64)
    return (matrix / matrix.norm(dim=1, keepdim=True) * lengths[:, None]).float()


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "krum"])
@pytest.mark.parametrize("width", [50, 20_000])
def test_float32_rows_that_nearly_cancel_lose_no_digits(stem: str, width: int) -> None:
    aggregator = made(stem)
    for seed in range(4):
        given = _dependent(4, width, seed)
        exact = by(aggregator, given.double())
        apart = by(aggregator, given).double() - exact
        assert apart.norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("width", [0, 7, 300, 315])
def test_a_combination_in_pieces_is_the_combination(
    monkeypatch: pytest.MonkeyPatch, width: int, count: int
) -> None:
    monkeypatch.setattr(row_algebra, "COLUMNS", 100)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(count, width, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)[:count]
    for dtype in (torch.float64, torch.float32, torch.float16):
        given = matrix.to(dtype)
        found = row_algebra.combine(given, weights)
        assert found.dtype == dtype
        torch.testing.assert_close(found, (weights @ given.double()).to(dtype))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_of_zero_does_not_hide_nan(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    monkeypatch.setattr(row_algebra, "COLUMNS", 5)
    given = torch.ones(2, 5)
    given[zero, 1], given[zero, 3] = torch.nan, torch.inf
    weights = torch.ones(2, dtype=torch.float64)
    weights[zero] = 0.0
    found = row_algebra.combine(given, weights)
    assert found.isnan().tolist() == [False, True, False, True, False]


def test_krum_handles_squares_whose_sum_overflows() -> None:
    square = torch.full((4, 4), 1.5e308, dtype=torch.float64)
    assert made("krum").weights(square).tolist() == [1.0, 0.0, 0.0, 0.0]
