"""Every aggregator gives what was worked out by hand."""

import pytest
import torch

from gradsurg.aggregators.base import AggregatorContext
from tests.aggregators.cases import CONFIGS, ROWS, Row, made


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.name}-{i}" for i, row in enumerate(ROWS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_aggregator_returns_the_hand_computed_result(row: Row, dtype: torch.dtype) -> None:
    losses = None if row.losses is None else torch.tensor(row.losses, dtype=torch.float64)
    rows = torch.tensor(row.rows, dtype=dtype)
    result = made(row.name, **row.fields)(rows, AggregatorContext(step=row.step, losses=losses))
    expected = torch.tensor(row.expected, dtype=dtype)
    torch.testing.assert_close(result, expected, rtol=row.tolerance, atol=row.tolerance)


def test_every_config_has_a_row() -> None:
    stems = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert stems - {"none"} == {row.name for row in ROWS}
