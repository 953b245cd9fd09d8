"""Every kind of site in the situations that all of them meet."""

import gc
from collections.abc import Iterator

import pytest

from gradsurg.plugins.registry import find, names
from tests.contexts.situations import ROWS, SITUATIONS


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Leave older objects out of garbage collections, which else take a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_kind_of_site_in_a_situation(kind: str, situation: str) -> None:
    SITUATIONS[situation](ROWS[kind])


def test_every_kind_is_in_the_table() -> None:
    classes = {type(row.at("*")).__name__ for row in ROWS.values()}
    assert classes | {"Combined"} == {find("sites", stem).__name__ for stem in names("sites")}


def test_what_differs_is_a_situation() -> None:
    assert {name for row in ROWS.values() for name in row.differs} <= {*SITUATIONS}
