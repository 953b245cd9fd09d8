"""The trade-off between tasks: which arms dominate which; and trajectories over landscapes."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.fronts import (
    MAX_CELLS,
    MAX_DRAWN,
    MAX_PLACES,
    MEAN,
    Front,
    Landscape,
    front_chart,
    front_figure,
    front_table,
    fronts,
    landscape_chart,
    landscapes,
    sections,
)
from gradsurg.report.study import read_study
from gradsurg.stats import t_critical
from tests.report import studies

Runs = list[tuple[float, ...]]


def found_in(folder: Path, **arms: Runs) -> list[Front]:
    return fronts(read_study(studies.tasks(folder / "study", **arms)))


def beaten(front: Front) -> dict[str, list[str]]:
    return dict(front.arms.select("arm", "dominated by").iter_rows())


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (
            {
                "a": (1.0, 4.0),
                "b": (2.0, 2.0),
                "c": (2.0, 3.0),
                "d": (3.0, 4.0),
                "none": (4.0, 1.0),
            },
            {"a": [], "b": [], "c": ["b"], "d": ["a", "b", "c"], "control": []},
        ),
        # a third task can save an arm
        (
            {"a": (1.0, 1.0, 3.0), "b": (2.0, 2.0, 1.0), "c": (3.0, 3.0, 3.0)},
            {"a": [], "b": [], "c": ["a", "b"]},
        ),
        # arms that end in one place do not dominate one another
        (
            {"a": (1.0, 1.0), "b": (1.0, 1.0 + 1e-6), "c": (1.0, 2.0)},
            {"a": [], "b": [], "c": ["a", "b"]},
        ),
    ],
)
def test_an_arm_is_dominated_by_those_no_worse_in_any_task_and_better_in_one(
    tmp_path: Path, arms: dict[str, tuple[float, ...]], expected: dict[str, list[str]]
) -> None:
    (front,) = found_in(tmp_path, **{name: [losses] for name, losses in arms.items()})
    assert (front.task, front.metric, front.names[:2]) == ("pair", "loss", ["first", "second"])
    assert beaten(front) == expected


def test_higher_is_better_in_a_metric_that_has_its_direction(tmp_path: Path) -> None:
    for label, (first, second) in {"a": (0.9, 0.8), "none": (0.7, 0.8)}.items():
        place = studies.plan(tmp_path, label, 0, task={"name": "pair"})
        shares = {"test/accuracy_first": first, "test/accuracy_second": second}
        studies.end(place, label, 0.5, **studies.several(1.0, 1.0), **shares)
    by_metric = {front.metric: front for front in fronts(read_study(tmp_path))}
    assert beaten(by_metric["accuracy"]) == {"a": [], "control": ["a"]}
    assert beaten(by_metric["loss"]) == {"a": [], "control": []}
    title = front_chart(by_metric["accuracy"], "first", "second").to_dict()["title"]
    assert title == "upper right is better"


def test_means_have_the_t_interval_over_at_least_three_runs(tmp_path: Path) -> None:
    (front,) = found_in(tmp_path, a=[(1.0, 5.0), (3.0, 9.0), (2.0, 7.0)], none=[(1.0, 1.0)] * 2)
    arms = {row["arm"]: row for row in front_table(front).to_dicts()}
    assert (arms["a"]["first"], arms["a"]["second"], arms["a"]["n"]) == (2.0, 7.0, 3)
    assert arms["a"]["first ±"] == pytest.approx(t_critical(3) / sqrt(3))
    assert arms["a"]["second ±"] == pytest.approx(2 * t_critical(3) / sqrt(3))
    assert arms["control"]["first ±"] is None
    assert [arms[name]["dominated by"] for name in ("a", "control")] == ["control", "none"]


def test_a_run_that_diverged_or_lacks_a_task_is_left_out(tmp_path: Path) -> None:
    study = studies.tasks(tmp_path / "study", a=[(1.0, 2.0)], none=[(1.0, 1.0)])
    place = studies.plan(study, "a", 1, task={"name": "pair"})
    studies.end(place, "a", 0.5, "diverged", **studies.several(9.0, 9.0))
    place = studies.plan(study, "a", 2, task={"name": "pair"})
    studies.end(place, "a", 0.5, **studies.several(9.0))
    (front,) = fronts(read_study(study))
    assert front.runs.filter(arm="a")["seed"].to_list() == [0]


def test_one_loss_one_arm_or_two_problems_are_no_trade_off(tmp_path: Path) -> None:
    assert found_in(tmp_path / "one", a=[(1.0,)], none=[(2.0,)]) == []
    assert found_in(tmp_path / "arm", a=[(1.0, 2.0)]) == []
    study = studies.tasks(tmp_path / "two", a=[(1.0, 2.0)])
    place = studies.plan(study, "none", 0, task={"name": "other"})
    studies.end(place, "none", 0.5, **studies.several(1.0, 1.0))
    assert fronts(read_study(study)) == sections(read_study(study)) == []


def test_losses_that_differ_in_their_last_digits_are_drawn_within_the_axes(tmp_path: Path) -> None:
    (front,) = found_in(tmp_path, a=[(1.9627292, 2.0)], none=[(1.9627293, 2.0)])
    spec = front_chart(front, "first", "second").to_dict()
    drawn = [row["x"] for layer in spec["layer"] for row in layer["data"]["values"]]
    low, high = axes_of(front_chart(front, "first", "second"))["x"]["scale"]["domain"]
    assert low < min(drawn) <= max(drawn) < high
    assert high - low == pytest.approx(2e-3 * 1.96, rel=0.01)


def axes_of(chart: Any) -> dict[str, Any]:  # Any: kinds of charts, JSON
    return next(layer["encoding"] for layer in chart.to_dict()["layer"])


def test_an_axis_has_room_for_all_runs_and_goes_by_logarithms_where_it_is_wide(
    tmp_path: Path,
) -> None:
    (front,) = found_in(tmp_path, a=[(1.0, -1.0), (3.0, -1.0)], none=[(100.0, 4.0)])
    axes = axes_of(front_chart(front, "first", "second"))
    x, y = (axes[axis]["scale"] for axis in "xy")
    assert (x["type"], x["domain"], axes["x"]["title"]) == (
        "log",
        [1, 100],
        "loss first (log scale)",
    )
    assert (y["type"], y["domain"], y["padding"]) == ("linear", [-1, 4], 14)
    assert axes["y"]["title"] == "loss second"


def test_the_chart_marks_arms_that_none_dominates(tmp_path: Path) -> None:
    (front,) = found_in(tmp_path, a=[(1.0, 1.0), (1.5, 2.0)], none=[(3.0, 3.0)])
    spec = front_chart(front, "first", "second").to_dict()
    points, arms = (layer["data"].get("values") for layer in spec["layer"][:2])
    assert [(row["number"], row["best"], row["control"]) for row in arms] == [
        (1, True, False),
        (2, False, True),
    ]
    assert [(row["x"], row["control"]) for row in points] == [(1, False), (1.5, False), (3, True)]


def test_more_than_six_pairs_are_said_to_be_more(tmp_path: Path) -> None:
    names = [f"task{number}" for number in range(5)]
    for label in ("a", "none"):
        place = studies.plan(tmp_path, label, 0, task={"name": "five"})
        numbers = {f"test/{m}_{name}": 0.5 for m in ("loss", "r2") for name in names}
        studies.end(place, label, 0.5, **numbers)
    found = fronts(read_study(tmp_path))
    assert [front.metric for front in found] == ["loss", "r2"]
    figure = front_figure(found[0]).to_dict()
    assert len(figure["concat"]) == 6
    assert "the first 6 of 10 pairs" in figure["title"]["text"]
    for number in range(MAX_DRAWN):
        place = studies.plan(tmp_path, "b", 0, task={"name": "five"}, value=number)
        studies.end(place, "b", 0.5, **numbers)
    (section,) = sections(read_study(tmp_path))
    assert section.notes == ["The first 60 of 62 arms are drawn."]
    for layer in section.charts[0].to_dict()["layer"][:2]:
        assert len(layer["data"]["values"]) == MAX_DRAWN
    assert (section.key, len(section.charts), len(section.tables)) == ("fronts", 12, 2)


def ground(study: Path) -> Landscape:
    (found,) = landscapes(read_study(study))
    return found


def toy_run(folder: Path, **content: object) -> studies.RunDirectory:
    """A run of a toy task that has logged nothing, and its landscape."""
    place = studies.plan(folder, "clip", 0)
    place.write_json("landscape.json", {**studies.GROUND, "start": [0, 0], **content})
    return place


def points_of(landscape: Landscape, arm: str, way: int = 0) -> list[tuple[float, float]]:
    return landscape.points.filter(arm=arm, way=way).select("x1", "x2").rows()


def test_runs_that_differ_in_their_start_are_ways_of_one_arm(tmp_path: Path) -> None:
    found = ground(studies.toy(tmp_path / "toy"))
    assert found.points["arm"].unique(maintain_order=True).to_list() == ["clip", "control"]
    ways = [points_of(found, "clip", way) for way in range(2)]
    assert sorted(ways) == [[(x, 1), (x, 0.5), (x, 0), (1, -1)] for x in (0.0, 2.0)]


def test_a_grid_has_the_ranks_of_each_loss_and_of_their_mean(tmp_path: Path) -> None:
    grid = ground(studies.toy(tmp_path / "toy")).grid
    levels = dict(grid.group_by("loss", maintain_order=True).agg("level").iter_rows())
    assert levels["loss 1"] == [0, 3, 7, 3, 7, 11]  # 0 1 2 1 2 3, of 15 levels
    assert levels[MEAN] == [5, 0, 0, 10, 5, 5]  # 2 1 1 3 2 2
    assert grid.filter(loss=MEAN).select("x1", "x2").rows()[:2] == [(0.0, -1.0), (1.0, -1.0)]


def test_a_fine_grid_is_thinned_and_a_loss_that_is_not_finite_has_no_cell(tmp_path: Path) -> None:
    fine = [number / 10 for number in range(101)]
    table = [[x1 * x2 for x1 in fine] for x2 in fine]
    table[0][0] = float("nan")
    toy_run(tmp_path / "toy", x1=fine, x2=fine, values={"1": table})
    cells = ground(tmp_path / "toy").grid.filter(loss="loss 1")
    assert len(cells) == MAX_CELLS**2 - 1
    assert cells["x1"].unique().sort().to_list() == fine[::2]


def test_a_pareto_set_that_goes_around_is_closed(tmp_path: Path) -> None:
    around = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    toy_run(tmp_path / "toy", pareto=around, closed=True)
    assert ground(tmp_path / "toy").pareto.rows() == [(0, 0), (1, 0), (1, 1), (0, 0)]


def test_a_run_that_logged_no_place_has_its_start_and_its_end(tmp_path: Path) -> None:
    place = toy_run(tmp_path / "toy")
    assert points_of(ground(tmp_path / "toy"), "clip") == [(0, 0)]
    studies.end(place, "clip", 0.5, **{"test/x1": 1.0, "test/x2": -1.0})
    assert points_of(ground(tmp_path / "toy"), "clip") == [(0, 0), (1, -1)]


def test_a_long_way_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    place = toy_run(tmp_path / "toy")
    for step in range(1, 1001):
        place.append("metrics.jsonl", [{"step": step, "test/x1": step / 1000, "test/x2": 0.5}])
    way = points_of(ground(tmp_path / "toy"), "clip")
    assert MAX_PLACES / 2 < len(way) <= MAX_PLACES
    assert (way[0], way[-1]) == ((0, 0), (1, 0.5))


def test_losses_that_are_nowhere_finite_are_no_landscape_and_a_pareto_set_may_be_empty(
    tmp_path: Path,
) -> None:
    toy_run(tmp_path / "toy", pareto=[])
    landscape = ground(tmp_path / "toy")
    assert landscape.pareto.is_empty()
    assert len(landscape_chart(landscape, facet=True).to_dict()["concat"]) == 4
    toy_run(tmp_path / "toy", pareto=[], values={"1": [[None] * 3] * 2})
    assert landscapes(read_study(tmp_path / "toy")) == []


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_broken_landscape_is_a_fault_and_the_rest_is_shown(tmp_path: Path, text: str) -> None:
    folder = studies.toy(tmp_path / "toy")
    run = sorted(folder.glob("clip-*"))[0]
    (run / "landscape.json").write_text(text, encoding="utf-8")
    study = read_study(folder)
    found, again = landscapes(study) + landscapes(study)
    assert found.points.equals(again.points)
    (told,) = study.faults
    assert told.startswith(f"{run.name}: landscape.json")
    assert found.points.select("arm", "way").n_unique() == 3


def test_a_file_has_a_panel_for_each_loss_and_arm_and_the_page_lists_of_them(
    tmp_path: Path,
) -> None:
    study = studies.toy(tmp_path / "toy")
    panels = landscape_chart(ground(study), facet=True).to_dict()["concat"]
    titles = [panel["title"] for panel in panels]
    assert titles == ["loss 1", "loss 2", MEAN, "clip", "control"]
    params = {one["name"]: one for one in landscape_chart(ground(study)).to_dict()["params"]}
    assert params["loss"]["bind"]["options"] == [MEAN, "loss 2", "loss 1"]
    assert params["arm"]["bind"]["options"] == ["clip", "control"]
    keys = [section.key for section in sections(read_study(study))]
    assert keys == ["fronts", "trajectories"]
