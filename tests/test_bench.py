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


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([9.0, 0.9], [1.0, 1.0, 1.0], ["(0.900)", "1.000"]),
        ([1.1, 1.1], [1.0, 1.0, 1.0], ["(1.100)", ">", "1", "1.000"]),
        ([1.1, 1.1], [1.2, 1.0, 1.15], ["(1.100)", "1.150"]),  # so far apart are halves of theirs
        ([1.1, 1.1], [1.0, 1.2, 1.04], ["(1.100)", ">", "1", "1.040"]),
        ([1.1, 1.1], [1.0, 1.2], ["(1.100)", ">", "1", "1.000"]),  # too few to tell
    ],
)
def test_a_ratio_of_the_least_times_is_marked_where_it_is_more_than_what_equal_work_is_apart(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    ours: list[float],
    theirs: list[float],
    said: list[str],
) -> None:
    own = import_module("bench_multitask")
    monkeypatch.setattr(own, "theirs", lambda name, count: torch.sum)
    monkeypatch.setattr(
        own, "measured", lambda *_: {"ours": ours, "theirs": theirs, "reads": [2.0]}
    )
    line = own.times(["Mean"], ["2x1000000"], 2).splitlines()[-1]
    assert line.split()[7:] == [*said, f"{min(ours) / 2:.2f}"]


@pytest.mark.full
def test_the_start_has_a_line_for_each_process_and_ratios_to_that_of_the_libraries(
    bench: ModuleType,
) -> None:
    _, _, base, helped = bench.bench_start.table(1, ["help"]).splitlines()
    assert base.startswith("import torch, hydra")
    assert base.split()[-2:] == ["1.00", "1.00"]
    assert helped.startswith("help")
    assert float(helped.split()[-1]) > 0


@pytest.mark.full
def test_the_telemetry_has_a_line_for_each_number_of_tasks_and_steps(bench: ModuleType) -> None:
    _, heads, _, *lines = bench.bench_telemetry.table(2).splitlines()
    assert heads.split()[:2] == ["tasks", "together"]
    rows = [line.split() for line in lines]
    assert [(row[0], row[1]) for row in rows] == [(t, n) for t in "238" for n in "15"]
    for row in rows:
        assert len(row) == 10
        assert all(float(number) > 0 for number in row[2:])


def test_the_kernel_of_effects_has_a_line_for_each_size(bench: ModuleType) -> None:
    _, _, *lines = bench.bench_kernel.table(1).splitlines()
    assert [line.split()[0] for line in lines] == ["100,000", "1,000,000"]


def test_the_sizes_of_a_language_model_have_their_rows(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = import_module("bench_size")
    model = size.parameters(width=8, blocks=12, tokens=10)
    assert len(list(model.parameters())) == 148
    monkeypatch.setattr(size, "parameters", lambda: model)
    size.main(["step", "norm", "--rounds", "1"])
    told = capsys.readouterr().out
    assert "ClipGlobalNorm" in told
    assert "float32 3072x768" in told
    with pytest.raises(SystemExit):
        size.main(["norms"])
    assert "ROW must be one of step, memory" in capsys.readouterr().err
