"""The table of properties in the README has all rows; test_properties.py checks their content."""

import re

import pytest

from tests.transforms.cases import names
from tests.transforms.table import HEAD, README
from tests.verdict_tables import written


def test_the_table_has_a_row_for_each_config_and_no_other() -> None:
    head, *rows = written(README)
    assert head == HEAD
    assert [line.split("|")[1].strip(" `") for line in rows] == names()


def test_every_property_of_every_config_is_decided() -> None:
    assert not [row for row in written(README) if "not tested" in row]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec(code, {})
    assert re.search(r"idempotent +yes", capsys.readouterr().out)
