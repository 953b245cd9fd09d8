"""The benchmark beside another library says what it lacks, and marks what it says it marks."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("bench")


def test_without_the_other_library_it_says_in_one_line_what_to_install(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    monkeypatch.setattr(sys, "argv", ["bench.py", "multitask"])
    with pytest.raises(SystemExit) as found:
        bench.main()
    assert found.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.endswith("not installed: pip install -e '.[bench]'\n")


@pytest.mark.parametrize(("ours", "mark"), [([9.0, 0.9], False), ([1.1, 1.1], True)])
def test_the_ratio_of_the_least_times_is_marked(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, ours: list[float], mark: bool
) -> None:
    own = import_module("bench_multitask")
    monkeypatch.setattr(own, "theirs", lambda name, count: torch.sum)
    monkeypatch.setattr(own, "measured", lambda *_: {"ours": ours, "theirs": [1.0, 1.0]})
    line = own.times(["Mean"], ["2x4"], 2).splitlines()[-1]
    assert line.endswith(f"({min(ours):.3f}){' > 1' if mark else ''}")
