"""Conflicts between tasks: means, tables, sentences and charts of rows made by hand."""

from math import nan
from pathlib import Path
from typing import Any

import pytest

from gradsurg.experiment.run_directory import CONFLICTS
from gradsurg.plugins.messages import TEXT_WIDTH
from gradsurg.report.conflicts import (
    COSINE,
    INTERVALS,
    LOST,
    MAX_PAIRS,
    MAX_TASKS,
    OTHERS,
    about_lengths,
    conflict_charts,
    conflict_means,
    conflict_tables,
    conflict_text,
    sections,
)
from gradsurg.report.study import Study, read_study
from tests.report import studies
from tests.report.studies import conflict

Rows = list[dict[str, object]]


def study_of(folder: Path, *runs: Rows, label: str = "mgda", **more: object) -> Study:
    """A study of one arm, a seed for each list of rows."""
    mine = {} if label == "none" else {"aggregator": {"name": label}, "transform": {}}
    for seed, rows in enumerate(runs):
        studies.plan(folder, label, seed, **mine, **more).append("conflicts.jsonl", rows)
    return read_study(folder)


def means_of(folder: Path, *runs: Rows) -> dict[str, dict[str, float]]:
    """The mean of each item of each number of a study of one arm."""
    means: dict[str, dict[str, float]] = {}
    rows = conflict_means(study_of(folder, *runs)).select("number", "item", "value")
    for number, item, value in rows.iter_rows():
        means.setdefault(number, {})[item] = value
    return means


def data_of(chart: Any) -> list[dict[str, Any]]:  # Any: kinds of charts, JSON
    spec = chart.to_dict()
    named = spec.get("datasets", {}).get(spec["data"].get("name"))
    return named or spec["data"]["values"]


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_means_are_over_a_runs_steps_and_then_over_the_runs(tmp_path: Path) -> None:
    one = [conflict("mgda", 0, -0.5), conflict("mgda", 10, 0.0)]
    found = means_of(tmp_path, one, [conflict("mgda", 0, 0.75)])
    assert found[COSINE] == {"task0 ~ task1": (-0.25 + 0.75) / 2}
    assert found["conflict rate"] == {"": 0.25}
    assert found["decrease"] == {"task0": 0.5, "task1": 1.5}
    assert found["weight of mgda"] == {"task0": 0.25, "task1": 0.25}
    assert "means over 3 measured steps of 2 runs:" in conflict_text(read_study(tmp_path))


def test_a_number_that_is_not_known_counts_nowhere(tmp_path: Path) -> None:
    bad = conflict("mgda", 0, nan, decrease=[nan, 2.0], norms=[float("inf"), 3.0])
    found = means_of(tmp_path / "two", [bad, conflict("mgda", 1, 0.5)])
    assert found[COSINE] == {"task0 ~ task1": 0.5}
    assert found["decrease"] == {"task0": 0.5, "task1": 1.75}
    assert found["norm"] == {"task0": 1.0, "task1": 2.0}
    assert found[LOST] == {"task0": 0.0, "task1": 0.0}
    none = {"weights": [], "weight_entropy": nan, "others": {}}
    study = study_of(tmp_path / "one", [{**bad, **none}])
    assert "mgda task1 3 - 2 0.0%" in words(conflict_text(study))
    assert data_of(conflict_charts(study)["conflict-weight"]) == []


def test_a_task_loses_where_the_update_raises_its_loss_beyond_rounding(tmp_path: Path) -> None:
    gains = (-0.1, -1e-8, 0.1, -1e-5)
    rows = [conflict("sum", at, 0.0, decrease=[gain, 1.0]) for at, gain in enumerate(gains)]
    assert means_of(tmp_path / "1", rows)[LOST] == {"task0": 0.5, "task1": 0.0}
    # norms of 1000, and an update of at most 2000: -1 is a cosine of -5e-7
    large = {"norms": [1000.0, 1000.0], "decrease": [-1.0, -3.0]}
    rows = [conflict("sum", 0, 0.0, **large)]
    assert means_of(tmp_path / "2", rows)[LOST] == {"task0": 0.0, "task1": 1.0}


def test_others_come_the_nearest_first(tmp_path: Path) -> None:
    alone = {"x": {"weights": [], "cosine": -1.0}}
    rows = [[conflict("mgda", 0), conflict("mgda", 1, others={})]]
    found = means_of(tmp_path, *rows, [conflict("mgda", 0, others=alone)])
    assert list(found[OTHERS].items()) == [("mean", 1.0), ("mgda", 0.75), ("x", -1.0)]
    text = " ".join(conflict_text(read_study(tmp_path)).split())
    assert "cosine to the update of mgda: 1 mean; 0.75 mgda; -1 x." in text


def test_the_arms_stand_side_by_side_with_the_control(tmp_path: Path) -> None:
    text = conflict_text(read_study(studies.clashing(tmp_path / "first")))
    caption, arms, tasks, *_ = map(words, text.split("\n\n"))
    assert caption == ["How the tasks conflict, means over 8 measured steps of 2 runs:"]
    assert (arms[0], arms[2], arms[3]) == (
        "arm pcgrad control",
        "n 2 2",
        "cosine task0 ~ task1 0.05 0.05",
    )
    assert arms[-1] == "most often lost none task0 25.0%"
    assert {"pcgrad task0 1 1 0.5 0.0%", "control task0 1 1 0.312 25.0%"} < {*tasks}


@pytest.mark.parametrize("count", [2, 4, 20])
def test_many_tasks_are_told_by_their_extremes_and_lines_stay_short(
    tmp_path: Path, count: int
) -> None:
    text = conflict_text(read_study(studies.clashing(tmp_path / "first", count)))
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert text.count("cosine task") == (4 if count > 4 else count * (count - 1) // 2)
    assert ("of 190 pairs the extremes; of 20" in text) == (count == 20)
    assert text.count("  task") == 2 * min(count, 6) + 2  # and the heads of both tables
    assert f"task{count - 1}" in text


def test_more_arms_than_fit_beside_one_another_are_said_to_be_more(tmp_path: Path) -> None:
    arms = ("pcgrad", "mgda", "upgrad", "cagrad")
    text = conflict_text(read_study(studies.clashing(tmp_path / "first", 2, arms)))
    assert "of 5 arms the first 4" in text
    assert "control" not in text


def test_the_sharpest_of_several_groups_is_told(tmp_path: Path) -> None:
    rows = [conflict("mgda", 0, cosine, group=name) for name, cosine in (("a", 0.5), ("b", -0.5))]
    rows[0]["decrease"], rows[1]["decrease"] = [-1.0, 1.0], [1.0, -1.0]
    rows.append(conflict("mgda", 1, -0.5, group="b"))
    study = study_of(tmp_path, rows)
    text = conflict_text(study)
    assert "of 2 groups the one with the sharpest conflict" in " ".join(text.split())
    assert {"arm mgda at b", "cosine task0 ~ task1 -0.5"} < {*words(text)}
    tables = dict(conflict_tables(study))
    assert tables["Conflict of each arm"]["most often lost"].to_list() == ["task0 at a 100.0%"]
    assert set(tables["Tasks"]["arm"]) == {"mgda at a", "mgda at b"}


def test_a_study_without_conflicts_has_no_text_no_charts_and_no_section(tmp_path: Path) -> None:
    study = read_study(studies.mixed(tmp_path / "first"))
    assert conflict_text(study) == ""
    assert conflict_tables(study) == about_lengths(study) == sections(study) == []
    assert conflict_charts(study) == {}


def test_the_tables_have_a_row_an_arm_a_task_and_another_aggregator(tmp_path: Path) -> None:
    study = read_study(studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda")))
    arms, tasks, others = (frame for _, frame in conflict_tables(study))
    assert arms["arm"].to_list() == ["mgda", "pcgrad", "control"]
    assert arms["most often lost"].to_list() == ["none", "none", "task0 25.0%"]
    assert arms["cosine task0 ~ task2"].to_list() == ["0.05"] * 3
    assert tasks.filter(arm="control")["decrease"].to_list() == ["0.312", "1.27", "2.05"]
    assert others.filter(arm="mgda").rows() == [
        ("mgda", "mean", "1", "0.25, 0.25, 0.25"),
        ("mgda", "mgda", "0.75", "0.25, 0.25, 0.25"),
    ]
    assert set(others["arm"]) == {"mgda", "pcgrad"}


def test_updates_that_are_shorter_than_the_controls_are_told_with_what_to_do(
    tmp_path: Path,
) -> None:
    folder = studies.clashing(tmp_path, 2, ("pcgrad", "mean", "upgrad"))
    assert about_lengths(read_study(folder)) == []
    for label, length in (("mean", 1.0), ("upgrad", 0.5)):
        for path in folder.glob(f"{label}-*"):
            (path / CONFLICTS).unlink()
            studies.RunDirectory(path).append(
                "conflicts.jsonl", [conflict(label, 0, norm_to_mean=length)]
            )
    (told,) = about_lengths(read_study(folder))
    assert "0.5 (mean) and 0.25 (upgrad) times as long as the control's" in told
    assert "pcgrad" not in told
    assert "control=norm_matched compares directions alone" in told


def test_the_map_cuts_the_steps_into_intervals_and_shows_the_pairs_that_conflict_most(
    tmp_path: Path,
) -> None:
    rows = [conflict("sum", step, -1.0 if step >= 50 else 1.0, 10) for step in range(100)]
    study = study_of(tmp_path, rows, rows, label="none")
    assert "What the others would have done" not in conflict_text(study)
    cells = data_of(conflict_charts(study)["conflicts"])
    ends = sorted({cell["end"] for cell in cells})
    assert (len(ends), ends[-1]) == (INTERVALS, 99)
    assert len({cell["item"] for cell in cells}) == MAX_PAIRS
    assert {cell["value"] for cell in cells if cell["end"] == ends[0]} == {1}
    assert {cell["value"] for cell in cells if cell["end"] == 99} == {-1}
    assert {cell["panel"] for cell in cells} == {"control, n = 2"}


def test_the_lines_have_the_interval_over_seeds_of_the_tasks_that_gain_least_and_most(
    tmp_path: Path,
) -> None:
    runs = [[conflict("sum", 0, count=9, decrease=[gain, *range(8)])] for gain in (1.0, 3.0)]
    charts = conflict_charts(study_of(tmp_path, *runs, label="none"))
    points = {point["item"]: point for point in data_of(charts["conflict-decrease"])}
    assert len(points) == MAX_TASKS
    assert "task4" not in points  # its decrease is in the middle
    reach = 12.706  # Student's t, one degree of freedom, times sd / sqrt(2) = 1
    first = points["task0"]
    assert first["value"] == 2
    assert [first["low"], first["high"]] == pytest.approx([2 - reach, 2 + reach], rel=1e-3)


def test_a_file_has_a_panel_for_each_arm_and_the_page_a_list_of_arms(tmp_path: Path) -> None:
    study = read_study(studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda")))
    names = ["mgda, n = 2", "pcgrad, n = 2", "control, n = 2"]
    files = conflict_charts(study, facet=True)
    assert list(files) == ["conflicts", "conflict-weight", "conflict-decrease"]
    for chart in files.values():
        assert chart.to_dict()["facet"]["sort"] == names
    for chart in conflict_charts(study).values():
        (chosen,) = [one for one in chart.to_dict()["params"] if one["name"] == "arm"]
        assert chosen["bind"]["options"] == names
    (section,) = sections(study)
    assert (section.key, len(section.charts), len(section.tables)) == ("conflicts", 3, 3)


def test_arms_that_are_read_in_parts_have_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = read_study(studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda")))
    whole = conflict_means(study)
    monkeypatch.setattr("gradsurg.report.conflicts.MAX_STEPS", 1)
    assert conflict_means(study).equals(whole)
