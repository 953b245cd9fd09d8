"""Every aggregator has the properties it declares, and keeps the rules."""

from typing import get_args

import pytest

from gradsurg.aggregators.base import AggregatorProperty
from gradsurg.plugins.registry import names
from gradsurg.testing import check_aggregator
from gradsurg.testing.aggregators import PROPERTY_CHECKS
from tests.aggregators.cases import ROWS, Row, made
from tests.aggregators.table import README, row
from tests.verdict_tables import written

ROWS_OF_OTHERS = [row for row in ROWS if row.fields]


@pytest.mark.parametrize("name", names("aggregators"))
def test_every_declared_property_holds_and_the_documented_row_is_what_the_checks_find(
    name: str,
) -> None:
    found = row(name)
    if name == "crmogm":  # whether the order of dependent gradients shows is a matter of rounding
        found = found.replace("(yes)", "")
    assert found in written(README), "python -m tests.aggregators.table writes it anew"


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", ROWS_OF_OTHERS, ids=lambda row: f"{row.name}-{dict(row.fields)}")
def test_every_declared_property_holds_with_other_fields(case: Row) -> None:
    check_aggregator(made(case.name, **case.fields))


@pytest.mark.full
@pytest.mark.parametrize("name", names("aggregators"))
def test_every_declared_property_holds_on_many_more_and_on_ten_million_columns(name: str) -> None:
    check_aggregator(made(name), count=200, num_tasks=(1, 2, 3, 5, 8, 16), max_columns=10_000_000)


def test_every_property_has_its_assertion() -> None:
    assert set(PROPERTY_CHECKS) == set(get_args(AggregatorProperty))
