"""Damaged run folders: the report and the command end as they should on each."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize(
    "first",
    [pytest.param(0, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.slow)],
)
def test_twelve_damaged_folders_are_reported_and_resumed(
    first: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    fuzz = import_module("fuzz")
    words = ["fuzz.py", "folders", "--count", "6", "--first", str(first)]
    monkeypatch.setattr(sys, "argv", words)
    faults = fuzz.main()
    output = capsys.readouterr().out
    assert faults == 0, output
    assert "exit code 0" in output
