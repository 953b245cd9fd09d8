"""The trade-off between tasks: which arms dominate which, and what the figure and the page say."""

import re
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.charts import rows_of
from gradsurg.report.figures import figures
from gradsurg.report.html import page
from gradsurg.report.outcome_charts import front_panel
from gradsurg.report.pareto import Front, clusters, ends_of
from gradsurg.report.study import study_report
from gradsurg.stats import t_critical
from tests.report import studies

Runs = list[tuple[float, ...]]


def fronts(folder: Path, **arms: Runs) -> list[Front]:
    return study_report(studies.tasks(folder / "study", **arms)).fronts


def beaten(front: Front) -> dict[str, list[str]]:
    return {mark.arm.name: mark.beaten_by for mark in front.marks}


def test_an_arm_is_dominated_by_those_no_worse_in_any_task_and_better_in_one(tmp_path: Path):
    (front,) = fronts(
        tmp_path,
        a=[(1.0, 4.0)],
        b=[(2.0, 2.0)],
        c=[(2.0, 3.0)],
        d=[(3.0, 4.0)],
        none=[(4.0, 1.0)],
    )
    assert (front.task, front.metric, front.names) == ("pair", "loss", ["first", "second"])
    assert beaten(front) == {"a": [], "b": [], "c": ["b"], "d": ["a", "b", "c"], "control": []}


def test_a_third_task_can_save_an_arm(tmp_path: Path):
    (front,) = fronts(tmp_path, a=[(1.0, 1.0, 3.0)], b=[(2.0, 2.0, 1.0)], c=[(3.0, 3.0, 3.0)])
    assert beaten(front) == {"a": [], "b": [], "c": ["a", "b"]}
    assert front.pairs == [(0, 1), (0, 2), (1, 2)]


def test_arms_that_end_in_one_place_do_not_dominate_one_another(tmp_path: Path):
    (front,) = fronts(tmp_path, a=[(1.0, 1.0)], b=[(1.0, 1.0 + 1e-6)], c=[(1.0, 2.0)])
    assert beaten(front) == {"a": [], "b": [], "c": ["a", "b"]}


def test_means_have_the_t_interval_over_runs_and_runs_keep_their_order(tmp_path: Path):
    (front,) = fronts(tmp_path, a=[(1.0, 5.0), (3.0, 9.0), (2.0, 7.0)], none=[(1.0, 1.0)])
    mark = front.marks[0]
    assert (mark.seeds, mark.values) == ([0, 1, 2], [[1.0, 3.0, 2.0], [5.0, 9.0, 7.0]])
    first, second = mark.means
    assert (first.mean, second.mean) == (2.0, 7.0)
    assert first.low == pytest.approx(2 - t_critical(3) / sqrt(3))
    assert second.high == pytest.approx(7 + 2 * t_critical(3) / sqrt(3))
    assert front.marks[1].means[0].low is None  # one run


def test_a_run_that_diverged_or_lacks_a_task_is_left_out(tmp_path: Path):
    study = studies.tasks(tmp_path / "study", a=[(1.0, 2.0)], none=[(1.0, 1.0)])
    place = studies.plan(study, "a", 1, task={"name": "pair"})
    studies.end(place, "a", 0.5, "diverged", **studies.several(9.0, 9.0))
    place = studies.plan(study, "a", 2, task={"name": "pair"})
    studies.end(place, "a", 0.5, **studies.several(9.0))
    (front,) = study_report(study).fronts
    assert front.marks[0].seeds == [0]


def test_one_loss_one_arm_or_two_problems_are_no_trade_off(tmp_path: Path):
    assert fronts(tmp_path / "one", a=[(1.0,)], none=[(2.0,)]) == []
    assert fronts(tmp_path / "arm", a=[(1.0, 2.0)]) == []
    study = studies.tasks(tmp_path / "two", a=[(1.0, 2.0)])
    place = studies.plan(study, "none", 0, task={"name": "other"})
    studies.end(place, "none", 0.5, **studies.several(1.0, 1.0))
    assert study_report(study).fronts == []


def test_an_axis_has_room_for_all_runs_and_goes_by_logarithms_where_it_is_wide(
    tmp_path: Path,
):
    (front,) = fronts(tmp_path, a=[(1.0, -1.0), (3.0, -1.0)], none=[(100.0, 4.0)])
    low, high, by_log = ends_of(front, 0)
    assert by_log
    assert 0.5 < low < 1 < 100 < high < 200
    assert ends_of(front, 1) == pytest.approx((-1.4, 4.4, False))


def test_marks_that_stand_close_together_share_a_text(tmp_path: Path):
    (front,) = fronts(tmp_path, a=[(1.0, 1.0)], b=[(5.0, 5.0)], none=[(1.1, 1.05)])
    assert clusters(front, 0, 1) == [((1.0, 1.0), "1, 3"), ((5.0, 5.0), "2")]


def test_the_chart_marks_arms_that_none_dominates_and_numbers_them(tmp_path: Path):
    (front,) = fronts(tmp_path, a=[(1.0, 1.0), (1.5, 2.0)], none=[(3.0, 3.0)])
    panel = front_panel(front, 0, 1)
    arms = rows_of(panel.data["arms"])
    assert [(row["number"], row["best"], row["control"]) for row in arms] == [
        (1, True, False),
        (2, False, True),
    ]
    assert [row["control"] for row in rows_of(panel.data["runs"])] == [False, False, True]
    assert studies.columns(panel, "texts")["text"] == ["1", "2"]
    assert "loss second over loss first" in panel.summary


def test_an_interval_beyond_the_axis_is_cut_at_its_edge(tmp_path: Path):
    clip = [(0.1, 1.0), (5.0, 2.0), (5.0, 1.0)]
    arms = {"clip": clip, "none": [(0.2, 3.0), (0.2, 4.0), (0.2, 3.5)]}
    (front,) = fronts(tmp_path, **arms)
    panel = front_panel(front, 0, 1)
    for name in ("x", "y"):
        limits: Any = panel.limits  # Any: numbers, by name
        low, high = limits[f"{name}_low"], limits[f"{name}_high"]
        rows: Any = rows_of(panel.data["arms"])
        for row in rows:
            assert low * 0.999 <= row[f"{name}_low"] <= row[f"{name}_high"] <= high * 1.001
    axes = str(panel.view)
    assert "loss first (log scale)" in axes
    assert "loss second (log scale)" not in axes


def test_each_metric_has_its_figure_and_more_than_six_pairs_are_said_to_be_more(tmp_path: Path):
    study = tmp_path / "study"
    names = [f"task{number}" for number in range(5)]
    for label in ("a", "none"):
        place = studies.plan(study, label, 0, task={"name": "five"})
        numbers = {f"test/{m}_{name}": 0.5 for m in ("loss", "r2") for name in names}
        studies.end(place, label, 0.5, **numbers)
    drawn = {figure.name: figure for figure in figures(study_report(study))}
    for stem in ("pareto", "pareto-2"):
        assert len(drawn[stem].panels) == 6
        assert "the first 6 of 10" in drawn[stem].title


def test_the_page_has_the_table_of_the_arms(tmp_path: Path):
    study = studies.tasks(tmp_path / "study", a=[(1.0, 1.0)], none=[(3.0, 2.0)])
    (section,) = re.findall(
        r'<section[^>]*id="fronts">.*?</section>', page(study_report(study)), re.S
    )
    (body,) = re.findall("<tbody>(.*?)</tbody>", section, re.S)
    rows = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
    assert rows == [["a", "1", "1", "1", "1", "none"], ["control", "2", "1", "3", "2", "a"]]
