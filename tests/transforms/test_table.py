"""The table of properties in the README agrees with the checks."""

import re

import pytest

from tests.transforms.cases import names
from tests.transforms.table import HEAD, README, row
from tests.verdict_tables import written


@pytest.mark.parametrize("name", names())
def test_the_documented_row_agrees_with_the_checks(name: str) -> None:
    assert row(name) in written(README), "python -m tests.transforms.table writes it anew"


def test_the_table_has_a_row_for_each_config_and_no_other() -> None:
    head, *rows = written(README)
    assert head == HEAD
    assert [line.split("|")[1].strip(" `") for line in rows] == names()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec(code, {})
    assert re.search(r"idempotent +yes", capsys.readouterr().out)
