"""The documented table of properties has all rows; test_properties.py checks their content."""

import re
import sys
from types import ModuleType

import pytest

from gradsurg.plugins.registry import find, names
from tests.aggregators.table import HEAD, README
from tests.verdict_tables import written


def test_the_table_has_a_row_for_each_aggregator_and_no_other() -> None:
    head, *rows = written(README)
    assert head == HEAD
    classes = [find("aggregators", name).__name__ for name in names("aggregators")]
    assert [line.split("|")[1].strip(" `") for line in rows] == classes


def test_the_example_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    example = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", example)  # where pickling finds the class again
    exec(code, vars(example))
    said = capsys.readouterr().out
    assert re.search(r"permutation_invariant +yes", said)
    assert re.search(r"scale_invariant +holds, not declared", said)
    assert re.search(r"homogeneous +no .*times 0\.125", said)
