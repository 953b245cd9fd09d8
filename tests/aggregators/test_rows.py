"""Numbers that overflow or lose digits in float32 are calculated in float64."""

from itertools import product
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from gradsurg.aggregators import rows as row_algebra
from gradsurg.aggregators.base import Aggregator
from tests.aggregators.cases import made
from tests.aggregators.gramian_cases import aggregators, by

SCALES = (1e-37, 1e-30, 1e-22, 1e-16, 1e20, 1e30, 1e36)


def normal(count: int, width: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=generator) * scale


def gramian(given: Tensor) -> Tensor:
    return given.double() @ given.double().T


def apart(found: Tensor, exact: Tensor) -> float:
    assert exact.any()
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read a second time."""

    def refused(rows: Tensor) -> NoReturn:
        raise AssertionError("read again, in float64")

    monkeypatch.setattr(row_algebra, "_in_float64", refused)


@aggregators()
def test_gradients_of_any_scale_are_combined_with_float64_precision(
    aggregator: Aggregator,
) -> None:
    for scale, count in product(SCALES, (2, 4)):
        if type(aggregator).__name__ == "Krum" and count == 2:
            continue
        for dtype, digits in ((torch.float32, 3e-7), (torch.bfloat16, 1e-2)):
            given = normal(count, 50, scale).to(dtype)
            assert apart(by(aggregator, given), by(aggregator, given.double())) <= digits


@pytest.mark.parametrize("width", [50, 20_000])
@pytest.mark.parametrize("scale", SCALES)
def test_a_gramian_is_accurate_at_any_scale(scale: float, width: int) -> None:
    for count in (1, 2, 3):
        given = normal(count, width, scale)
        assert apart(row_algebra.gramian_of([given]), gramian(given)) <= 3e-7


@pytest.mark.parametrize("scale", SCALES)
def test_a_single_row_of_another_scale_is_detected(scale: float) -> None:
    for count in (2, 3):
        given = normal(count, 50)
        given[0] *= scale
        exact = gramian(given)
        lengths = exact.diagonal().sqrt()
        error = (row_algebra.gramian_of([given]) - exact) / torch.outer(lengths, lengths)
        assert error.abs().max() <= 3e-7


def test_rows_are_checked_in_each_block() -> None:
    zeros = torch.zeros(2, 7, dtype=torch.bfloat16)
    given = normal(2, 50, 1e-30)
    assert apart(row_algebra.gramian_of([zeros, given]), gramian(given)) <= 3e-7


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("count", [2, 3])
def test_common_zero_and_nan_rows_are_read_once(count: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (1e-6, 1.0, 1e4):
            given = normal(count, 5000, scale).to(dtype)
            assert apart(row_algebra.gramian_of([given]), gramian(given)) <= 1e-6
            given[0] = 0
            assert not row_algebra.gramian_of([given])[0].any()
            given[0, 1] = torch.nan
            assert row_algebra.gramian_of([given])[0].isnan().all()
    assert not row_algebra.gramian_of([torch.zeros(count, 5)]).any()
    assert not row_algebra.gramian_of([torch.zeros(count, 0)]).any()


def test_a_row_that_is_not_finite_stays_so() -> None:
    for bad in (torch.inf, torch.nan):
        for count in (2, 3):
            given = normal(count, 50)
            given[1, 3] = bad
            found = row_algebra.gramian_of([given])
            assert not found[1].isfinite().any()
            assert found[0, 0].isfinite()


# Rows of a number each, and their weights: of what matters, something is out of float32's range.
WEIGHED = [
    ([1e-30, 1e-30], [1e40, 2e40]),
    ([1e30, 1e36], [1e-38, 2e-44]),
    ([2e38, 2e38], [2.0, -1.0]),
    ([0.0, 1.0], [1e40, 3.0]),
]


@pytest.mark.parametrize(("numbers", "weights"), WEIGHED)
def test_weights_and_sums_beyond_float32_are_combined_in_float64(
    numbers: list[float], weights: list[float]
) -> None:
    given = torch.tensor(numbers)[:, None] * torch.tensor([1.0, -0.5])
    own = torch.tensor(weights, dtype=torch.float64)
    (found,) = row_algebra.combine_safely([given], own, gramian(given))
    assert apart(found, own @ given.double()) <= 1e-6
    if max(numbers) < 1e38:  # of rows alone nobody knows the size
        assert apart(row_algebra.combine(given, own), own @ given.double()) <= 1e-6


@pytest.mark.usefixtures("one_look")
def test_a_small_weight_that_does_not_matter_costs_nothing() -> None:
    given = normal(3, 50)
    for weights in ([1.0, 1e-300, 2.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0], [torch.nan] * 3):
        own = torch.tensor(weights, dtype=torch.float64)
        (found,) = row_algebra.combine_safely([given], own, gramian(given))
        torch.testing.assert_close(found.double(), own @ given.double(), equal_nan=True)


def _at(cosine: float, width: int = 20_000) -> Tensor:
    """Two rows in float32 of length one, at an angle."""
    one, two = normal(2, width).double()
    one = one / one.norm()
    two = two - (one @ two) * one
    turned = cosine * one + (1 - cosine**2) ** 0.5 * two / two.norm()
    return torch.stack([one, turned]).float()


@pytest.mark.parametrize("stem", ["nash_mtl", "aligned_mtl"])
@pytest.mark.parametrize("cosine", [-0.9999, -0.999999, 0.9999])
def test_two_rows_that_are_nearly_one_lose_no_digits(stem: str, cosine: float) -> None:
    given = _at(cosine)
    exact = by(made(stem), given.double())
    assert (by(made(stem), given).double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("left", [0.15, 0.05])
def test_rows_that_nearly_cancel_are_combined_in_float64(left: float) -> None:
    """The sum is so much shorter than the rows together."""
    given = _at(left**2 / 2 - 1)
    weights = torch.tensor([1 / 3, 1 / 3], dtype=torch.float64)
    exact = weights @ given.double()
    (found,) = row_algebra.combine_safely([given], weights, gramian(given))
    assert apart(found, exact) <= 5e-8
    assert (
        apart(row_algebra.combine(given, weights), exact) > 1e-7
    )  # which is what float32 would cost


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_entry_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    largest = torch.full((2, 50), torch.finfo(dtype).max, dtype=dtype)  # their sum overflows
    assert row_algebra.is_finite(largest)
    assert row_algebra.is_finite(largest[:, :0])
    for entry in (torch.nan, torch.inf, -torch.inf):
        given = largest.clone()
        given[1, 30] = entry
        assert not row_algebra.is_finite(given)
