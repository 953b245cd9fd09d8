"""The sum that is as long as what an aggregator makes: the control of a direction."""

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, AggregatorContext, NormMatchedSum
from gradsurg.multitask.aggregation import aggregate
from gradsurg.testing import check_aggregator
from gradsurg.testing.aggregators import FunctionAggregator

every = pytest.mark.parametrize(
    "of",
    [gs.MGDA(), gs.NashMTL(), gs.TrimmedMean(), gs.GradDrop()],
    ids=lambda of: type(of).__name__,
)


def normal(count: int = 3, width: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


@every
def test_the_result_has_the_direction_of_the_sum_and_the_norm_of_the_aggregator(
    of: Aggregator,
) -> None:
    rows = normal()
    total, other = rows.sum(0), of(rows)
    found = NormMatchedSum(of)(rows)
    torch.testing.assert_close(found, total / total.norm() * other.norm())


def test_a_sum_of_zero_stays_zero_and_a_nan_propagates() -> None:
    control = NormMatchedSum(gs.GradDrop())
    rows = normal(1).float()
    assert not control(torch.cat([rows, -rows])).any()
    rows[0, 3] = torch.nan
    assert control(rows).isnan().all()


@pytest.mark.slow
@every
def test_it_passes_the_checks_of_every_aggregator(of: Aggregator) -> None:
    check_aggregator(NormMatchedSum(of))


def test_half_precision_rows_whose_norm_overflows_are_supported() -> None:
    rows = (normal(2, 4_000) * 2e3).half()
    assert rows[0].norm().isinf()
    found = NormMatchedSum(gs.MGDA())(rows)
    assert found.dtype is torch.float16
    exact = gs.MGDA()(rows.double()).norm()
    torch.testing.assert_close(found.double().norm(), exact, rtol=1e-3, atol=0.0)
    alike = torch.full((3, 4), 6e4).half()  # whose sum has no room in the dtype
    torch.testing.assert_close(NormMatchedSum(gs.MGDA())(alike), alike[0])


@every
def test_parameters_of_several_dtypes_are_one_gradient(of: Aggregator) -> None:
    rows = normal().float()
    blocks = [rows[:, :30], rows[:, 30:].double()]
    control, context = NormMatchedSum(of), AggregatorContext()
    found = aggregate(control, blocks, control.init(3), context).grads
    assert [grad.dtype for grad in found] == [torch.float32, torch.float64]
    expected = control(rows.double(), context)
    together = torch.cat([grad.double() for grad in found])
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)


def test_a_loss_scale_has_the_effect_that_it_has_on_the_aggregator() -> None:
    control, rows, scale = NormMatchedSum(gs.NashMTL()), normal(), 2.0**16
    state = control.init(3)
    (found,) = aggregate(control, [rows * scale], state, AggregatorContext(), scale).grads
    torch.testing.assert_close(found / scale, control(rows))
    assert not gs.Intervention(control, at=gs.SharedParameters()).loss_scale_error()
    sized = NormMatchedSum(FunctionAggregator(lambda rows: rows.sum(0).sign(), ()))
    assert (
        "depends on the size" in gs.Intervention(sized, at=gs.SharedParameters()).loss_scale_error()
    )


def test_it_requires_the_number_of_tasks_of_the_aggregator() -> None:
    assert NormMatchedSum(gs.AGEM()).num_tasks == 2
    assert NormMatchedSum(gs.MGDA()).num_tasks is None
    assert NormMatchedSum(gs.Krum()).least_tasks == 3
