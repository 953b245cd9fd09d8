"""The benchmark beside another library says what it lacks, and marks what it says it marks."""

import sys
from pathlib import Path

import pytest
import torch

from scripts.bench import kernel, multitask, size, telemetry
from scripts.bench.__main__ import TABLES, main


def test_without_the_other_library_it_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    with pytest.raises(SystemExit) as found:
        main(["multitask"])
    assert found.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.endswith("not installed: pip install -e '.[bench]'\n")


def test_one_command_measures_all_tables_of_the_page_about_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multitask, "lacking", lambda: "")
    for name in TABLES:
        monkeypatch.setitem(TABLES, name, (7, lambda args, name=name: f"{name} {args.rounds}"))
    main(["costs"])
    names = [name for name in TABLES if name not in ("kernel", "telemetry", "runner")]
    assert capsys.readouterr().out.splitlines() == [f"{name} 7" for name in names]
    page = (Path(__file__).parents[1] / "docs" / "costs.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page or f"bench {name} " in page for name in names)
    main(["kernel", "--rounds", "2"])
    assert capsys.readouterr().out == "kernel 2\n"


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
    monkeypatch: pytest.MonkeyPatch,
    ours: list[float],
    theirs: list[float],
    said: list[str],
) -> None:
    monkeypatch.setattr(multitask, "theirs", lambda name, count: torch.sum)
    monkeypatch.setattr(
        multitask, "measured", lambda *_: {"ours": ours, "theirs": theirs, "reads": [2.0]}
    )
    line = multitask.times(["Mean"], ["2x1000000"], 2).splitlines()[-1]
    assert line.split()[7:] == [*said, f"{min(ours) / 2:.2f}"]


def test_a_method_whose_packages_the_other_library_misses_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def theirs(name: str, count: int) -> object:
        if name == "CAGrad":
            raise ImportError
        return torch.sum

    monkeypatch.setattr(multitask, "theirs", theirs)
    _, _, line = multitask.times(["CAGrad", "Mean"], ["2x10"], 2).splitlines()
    assert line.startswith("Mean")


@pytest.mark.full
def test_the_telemetry_has_a_line_for_each_number_of_tasks_and_steps() -> None:
    heads, _, *lines = telemetry.table(2).splitlines()
    assert heads.split()[:2] == ["tasks", "together"]
    rows = [line.split() for line in lines]
    assert [(row[0], row[1]) for row in rows] == [(t, n) for t in "238" for n in "15"]
    for row in rows:
        assert len(row) == 4
        assert all(float(number) > 0 for number in row[2:])


def test_the_kernel_of_effects_has_a_line_for_each_size() -> None:
    _, _, *lines = kernel.table(1).splitlines()
    assert [line.split()[0] for line in lines] == ["100,000", "1,000,000"]


def test_the_sizes_of_a_language_model_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = size.parameters(width=8, blocks=12, tokens=10)
    assert len(list(model.parameters())) == 148
    monkeypatch.setattr(size, "parameters", lambda: model)
    printed = size.table(1, ["step", "norm"])
    assert "ClipGlobalNorm" in printed
    assert "float32 3072x768" in printed
    assert size.table(1, ["norms"]) == ""
