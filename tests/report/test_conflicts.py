"""What is said of conflicts, against rows made by hand."""

from math import isnan
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from gradsurg.plugins.messages import TEXT_WIDTH
from gradsurg.report.charts import Grid
from gradsurg.report.conflicts import (
    MAX_PAIRS,
    MAX_TASKS,
    NUM_INTERVALS,
    ConflictMeans,
    conflict_means,
    conflict_text,
)
from gradsurg.report.export import study_info, write_report
from gradsurg.report.figures import figures
from gradsurg.report.load import stamp
from gradsurg.report.study import study_report
from gradsurg.report.text import Runs, overview, report
from gradsurg.report.training_sections import other_aggregators
from gradsurg.training.frames import read_conflicts
from gradsurg.training.run_directory import CONFLICTS, RunDirectory
from tests.report import studies
from tests.report.studies import conflict

NO_EFFECT = "No effect was measured"


def written(folder: Path, *rows: dict[str, object]) -> Path:
    RunDirectory(folder).append_conflicts(rows)
    return folder


def means_of(*paths: Path) -> ConflictMeans:
    return conflict_means(read_conflicts(paths))


def test_means_are_over_a_runs_steps_and_then_over_the_runs(tmp_path: Path) -> None:
    one = written(tmp_path / "1", conflict("mgda", 0, -0.5), conflict("mgda", 10, 0.0))
    two = written(tmp_path / "2", conflict("mgda", 0, 0.75))
    found = means_of(one, two)
    assert (found.runs, found.steps, found.tasks) == (2, 3, ["task0", "task1"])
    assert found.cosines[1, 0] == pytest.approx((-0.25 + 0.75) / 2)
    assert found.single["conflict_rate"] == pytest.approx(0.25)
    assert found.decrease.tolist() == [0.5, 1.5]


def test_a_number_that_is_not_known_counts_nowhere(tmp_path: Path) -> None:
    bad = conflict("mgda", 0, float("nan"), decrease=[float("nan"), 2.0], norms=[float("inf"), 3.0])
    found = means_of(written(tmp_path, bad, conflict("mgda", 1, 0.5)))
    assert found.cosines[1, 0] == 0.5
    assert found.decrease.tolist() == [0.5, 1.75]
    assert found.norms.tolist() == [1.0, 2.0]
    assert found.lost.tolist() == [0.0, 0.0]
    only = means_of(written(tmp_path / "only", bad))
    assert isnan(only.decrease[0])


def test_a_task_loses_where_its_decrease_is_below_zero_beyond_rounding(tmp_path: Path) -> None:
    rows = [
        conflict("sum", 0, 0.0, decrease=[-0.1, 1.0]),
        conflict("sum", 1, 0.0, decrease=[-1e-8, 1.0]),
        conflict("sum", 2, 0.0, decrease=[0.1, 1.0]),
        conflict("sum", 3, 0.0, decrease=[-1e-5, 1.0]),
    ]
    assert means_of(written(tmp_path, *rows)).lost.tolist() == [0.5, 0.0]


def test_others_have_their_cosines_the_nearest_first_also_where_a_run_has_not_asked_them(
    tmp_path: Path,
) -> None:
    one = written(tmp_path / "1", conflict("mgda", 0), conflict("mgda", 1, others={}))
    two = written(
        tmp_path / "2", conflict("mgda", 0, others={"x": {"weights": [], "cosine": -1.0}})
    )
    three = written(tmp_path / "3", conflict("mgda", 0, others={}))
    found = means_of(one, two, three).others
    assert {name: cosine for name, (cosine, _) in found.items()} == {
        "mean*": 1.0,
        "mgda*": 0.75,
        "x*": -1.0,
    }
    assert list(found) == ["mean*", "mgda*", "x*"]
    assert found["mgda*"][1].tolist() == [0.25, 0.25]


def test_an_aggregator_without_weights_has_none(tmp_path: Path) -> None:
    place = written(tmp_path, conflict("grad_drop", 0, weights=[], weight_entropy=float("nan")))
    assert len(means_of(place).weights) == 0
    (row,) = [line for line in conflict_text([("a", [place])]).splitlines() if "task1" in line][1:]
    assert row.split() == ["task1", "1", "-", "1.5", "0.0%"]


def pairs_in(folder: Path) -> list[Runs]:
    controls = sorted(folder.glob("none-seed*"))
    return [Runs(a, b) for a, b in zip(sorted(folder.glob("pcgrad-*")), controls, strict=True)]


def test_a_job_prints_its_conflicts_beside_the_controls(tmp_path: Path) -> None:
    text = report(pairs_in(studies.clashing(tmp_path / "first")))
    assert NO_EFFECT not in text
    table = text.partition("How the tasks conflict")[2].splitlines()
    assert table[2].split() == ["pcgrad", "control"]
    assert table[4].split() == ["cosine", "task0", "~", "task1", "0.05", "0.05"]
    assert "means over 2 runs, 4 measured steps each" in text
    assert "cosine to the update of pcgrad: 1 mean; 0.75 mgda." in text
    lost = [line.split()[-1] for line in text.splitlines() if "task0" in line][1:]
    assert lost == ["0.0%", "25.0%"]
    assert text.index("pcgrad: ") < text.index("How the tasks conflict")


@pytest.mark.parametrize("count", [2, 3, 4, 8, 20])
def test_many_tasks_are_told_by_their_extremes_and_lines_stay_short(
    tmp_path: Path, count: int
) -> None:
    folder = studies.clashing(tmp_path / "first", count)
    text = report(pairs_in(folder))
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert text.count("cosine task") == (4 if count > 4 else count * (count - 1) // 2)
    assert (f"{count * (count - 1) // 2 - 4} pairs between" in text) == (count > 4)
    assert ("14 between" in text) == (count == 20)
    assert f"task{count - 1}" in text
    table = overview(study_report(folder))
    assert max(map(len, table.splitlines())) <= TEXT_WIDTH
    assert "task0 25.0%" not in table.partition("conflict between tasks")[0]


def test_the_sharpest_of_several_groups_is_told(tmp_path: Path) -> None:
    rows = [conflict("mgda", 0, cosine, group=name) for name, cosine in (("a", 0.5), ("b", -0.5))]
    control = written(tmp_path / "control", conflict("sum", 0, 0.25))
    text = conflict_text([("mgda", [written(tmp_path, *rows)]), ("control", [control])])
    assert text.startswith("How the tasks conflict at b, of 2 groups the one with the")
    assert text.split("\n\n")[1].splitlines()[0].split() == ["mgda", "control", "at", "shared"]
    assert "  -0.5  " in text


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((2, 2), "means over 2 runs, 2 measured steps each:"),
        ((6, 4), "means over 2 runs, 4 to 6 measured steps each:"),
        ((1, 1), "means over 2 runs, 1 measured step each:"),
        ((3,), "means over 1 run, 3 measured steps:"),
    ],
)
def test_runs_of_different_length_are_not_said_to_have_measured_as_many_steps(
    tmp_path: Path, steps: tuple[int, ...], said: str
) -> None:
    runs = [
        written(tmp_path / str(run), *(conflict("mgda", step) for step in range(count)))
        for run, count in enumerate(steps)
    ]
    assert said in conflict_text([("mgda", runs)])


def test_without_a_row_an_aggregator_says_that_nothing_was_measured(tmp_path: Path) -> None:
    folder = studies.clashing(tmp_path / "first")
    for file in folder.glob(f"*/{CONFLICTS}"):
        file.unlink()
    text = report(pairs_in(folder))
    assert NO_EFFECT not in text
    assert "No conflict was measured: effects_every=0." in text


def test_a_study_has_a_row_for_each_arm_and_says_what_others_would_have_done(
    tmp_path: Path,
) -> None:
    text = overview(study_report(studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda"))))
    table = text.partition("conflict between tasks")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table[3:6]}
    assert list(rows) == ["mgda", "pcgrad", "control"]
    assert rows["control"][-2:] == ["task0", "25.0%"]
    assert rows["pcgrad"][-1] == "none"
    assert "cosine to the update of mgda" in text
    assert "cosine to the update of control" not in text


def test_updates_that_are_shorter_than_the_controls_are_told_with_what_to_do(
    tmp_path: Path,
) -> None:
    study = studies.clashing(tmp_path, 2, ("pcgrad", "mean", "upgrad"))
    assert not any("as long as" in text for text in study_report(study).cautions)
    for label, length in (("mean", 1.0), ("upgrad", 0.5)):
        for folder in study.glob(f"{label}-*"):
            (folder / CONFLICTS).unlink()
            written(folder, conflict(label, 0, norm_to_mean=length))
    (said,) = [text for text in study_report(study).cautions if "as long as" in text]
    assert "0.5 (mean) and 0.25 (upgrad) times as long as the control's" in said
    assert "pcgrad" not in said
    assert "control=norm_matched compares directions alone" in said


def test_others_that_are_equal_in_all_that_is_shown_are_one_row(tmp_path: Path) -> None:
    same = {"weights": [0.25, 0.25], "cosine": 0.99999}
    others = {
        "mean": same,
        "dual_proj": {**same, "cosine": 1.0},
        "sum": {**same, "weights": [1.0, 1.0]},
        "mgda": {**same, "cosine": 0.5},
    }
    study = studies.clashing(tmp_path / "first")
    for path in study.glob("pcgrad-*"):
        (path / CONFLICTS).unlink()
        written(path, conflict("pcgrad", 0, others=others))
    treated, _ = study_report(study).conflicts
    assert other_aggregators(treated) == {
        "aggregator": ["dual_proj, mean", "sum", "mgda"],
        "cosine": [1, 0.99999, 0.5],
        "task0": [0.25, 1, 0.25],
        "task1": [0.25, 1, 0.25],
    }


def test_series_cut_the_steps_into_intervals_and_show_the_same_pairs_for_all(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "first"
    for seed in range(2):
        place = studies.plan(folder, "none", seed)
        rows = [conflict("sum", step, -1.0 if step >= 50 else 1.0, 10) for step in range(100)]
        place.append_conflicts(rows)
    (series,) = study_report(folder).conflicts
    assert len(series.ends) == NUM_INTERVALS
    assert series.ends[-1] == 99
    assert series.cosines.shape == (MAX_PAIRS, NUM_INTERVALS)
    assert series.cosines[0, 0] == 1.0
    assert series.cosines[0, -1] == -1.0
    assert len(series.shown) == MAX_TASKS
    assert series.weights is not None
    assert series.weights.mean.shape == (MAX_TASKS, NUM_INTERVALS)
    assert np.all(series.decrease.low == series.decrease.high)  # the seeds are alike


def test_the_interval_of_a_line_is_that_over_seeds(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    for seed, gain in enumerate((1.0, 3.0)):
        studies.plan(folder, "none", seed).append_conflicts(
            [conflict("sum", 0, decrease=[gain, 0.0])]
        )
    (series,) = study_report(folder).conflicts
    reach = 12.706204736432095  # Student's t, one degree of freedom, times sd/sqrt(2) = 1
    assert series.decrease.mean[0, 0] == 2.0
    assert series.decrease.low[0, 0] == pytest.approx(2.0 - reach)
    assert series.decrease.high[0, 0] == pytest.approx(2.0 + reach)


def test_the_rows_lie_beside_the_page_as_parquet(tmp_path: Path) -> None:
    folder = studies.clashing(tmp_path / "first")
    write_report(study_report(folder), tmp_path / "out", figures=False)
    found = pl.read_parquet(tmp_path / "out" / "conflicts.parquet")
    assert len(found) == 16
    assert found.columns[:4] == ["run", "arm", "seed", "state"]
    assert "others" not in found.columns
    assert {"cosines", "others.mgda.cosine", "others.mgda.weights"} < set(found.columns)
    write_report(study_report(studies.mixed(tmp_path / "none")), tmp_path / "out", figures=False)
    assert not (tmp_path / "out" / "conflicts.parquet").exists()


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = studies.clashing(tmp_path / "first")
    before = stamp(folder)
    broken = next(iter(sorted(folder.glob("pcgrad-*")))) / CONFLICTS
    broken.write_text('{"step": nonsense}\n', encoding="utf-8")
    assert stamp(folder) != before
    found = study_report(folder)
    assert any("pcgrad-seed0" in said and CONFLICTS in said for said in found.cautions)
    assert [one.means.runs for one in found.conflicts] == [1, 2]


@pytest.mark.slow
def test_there_is_a_figure_of_the_map_of_weights_and_of_decrease_and_loggers_get_them(
    tmp_path: Path,
) -> None:
    folder = studies.clashing(tmp_path / "first", 9, ("pcgrad", "mgda"))
    found = study_report(folder)
    write_report(found, tmp_path / "out")
    names = {name for name, _ in study_info(found, tmp_path / "out").figures}
    assert {"conflicts", "conflict-weights", "conflict-decrease"} < names
    assert (tmp_path / "out" / "conflicts.svg").is_file()
    drawn = {figure.name: figure.panels for figure in figures(found)}
    names = ["mgda, n = 2", "pcgrad, n = 2", "control, n = 2"]
    assert [panel.title for panel in drawn["conflicts"]] == names
    for panel in drawn["conflict-decrease"]:
        tasks = panel.data["tasks"]
        assert isinstance(tasks, Grid)
        assert len(set(tasks.labels["task"])) == MAX_TASKS
    without = {figure.name for figure in figures(study_report(studies.mixed(tmp_path / "x")))}
    assert not without & {"conflicts", "conflict-weights", "conflict-decrease"}
