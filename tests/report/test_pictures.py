"""ArmTrajectories over a landscape: what is read from the runs, and what the figure draws of it."""

from pathlib import Path

import pytest
from matplotlib.collections import LineCollection

from gradsurg.report.html import page
from gradsurg.report.pictures import draw_trajectories, write_trajectories
from gradsurg.report.series import MAX_PLACES, Landscape, Trajectory
from gradsurg.report.study import study_report
from tests.report import studies


def ground(study: Path) -> Landscape:
    (found,) = study_report(study).landscapes
    return found


def test_runs_that_differ_in_their_start_are_ways_of_one_arm(tmp_path: Path):
    found = ground(studies.toy(tmp_path / "toy"))
    assert [arm.name for arm in found.arms] == ["clip", "control"]
    assert found.arms[0].trajectories == [
        Trajectory(0, [0.0, 0.0, 0.0, 1.0], [1.0, 0.5, 0.0, -1.0]),
        Trajectory(0, [2.0, 2.0, 2.0, 1.0], [1.0, 0.5, 0.0, -1.0]),
    ]
    assert found.task == "toy"


def test_the_mean_is_that_of_the_losses_cell_by_cell(tmp_path: Path):
    assert ground(studies.toy(tmp_path / "toy")).mean == [[2.0, 1.0, 1.0], [3.0, 2.0, 2.0]]


def test_a_pareto_set_that_goes_around_is_closed(tmp_path: Path):
    place = studies.plan(tmp_path / "toy", "clip", 0)
    around = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    place.write_landscape({**studies.GROUND, "start": [0, 0], "pareto": around, "closed": True})
    assert ground(tmp_path / "toy").pareto == [*around, [0.0, 0.0]]


def test_a_run_that_logged_no_place_has_its_start_and_its_end(tmp_path: Path):
    place = studies.plan(tmp_path / "toy", "clip", 0)
    place.write_landscape({**studies.GROUND, "start": [0, 0]})
    assert ground(tmp_path / "toy").arms[0].trajectories == [Trajectory(0, [0.0], [0.0])]
    studies.end(place, "clip", 0.5, **{"test/x1": 1.0, "test/x2": -1.0})
    assert ground(tmp_path / "toy").arms[0].trajectories == [Trajectory(0, [0.0, 1.0], [0.0, -1.0])]


def test_a_long_way_is_thinned_and_keeps_its_ends(tmp_path: Path):
    place = studies.plan(tmp_path / "toy", "clip", 0)
    place.write_landscape({**studies.GROUND, "start": [0, 0]})
    for step in range(1, 1001):
        place.append_metrics({"step": step, "test/x1": step / 1000, "test/x2": 0.5})
    (way,) = ground(tmp_path / "toy").arms[0].trajectories
    assert len(way.x1) == MAX_PLACES
    assert (way.x1[0], way.x1[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_broken_landscape_is_told_and_the_rest_is_reported(tmp_path: Path, text: str):
    study = studies.toy(tmp_path / "toy")
    run = sorted(study.glob("clip-*"))[0]
    (run / "landscape.json").write_text(text, encoding="utf-8")
    report = study_report(study)
    (said,) = [line for line in report.cautions if "landscape.json" in line]
    assert run.name in said
    assert sum(len(arm.trajectories) for arm in report.landscapes[0].arms) == 3


def test_the_figure_has_a_panel_for_each_loss_the_mean_and_each_arm(tmp_path: Path):
    figure = draw_trajectories(ground(studies.toy(tmp_path / "toy")))
    titles = [panel.get_title(loc="left") or panel.get_title() for panel in figure.axes]
    assert titles == ["loss 1", "loss 2", "mean of the losses", "clip", "control"]
    for panel, ways in zip(figure.axes, (0, 0, 0, 2, 2), strict=True):
        lines = [one for one in panel.collections if isinstance(one, LineCollection)]
        assert len(lines) == ways
        markers = [line.get_marker() for line in panel.lines]
        assert (markers.count("o"), markers.count("*")) == (ways, ways)
        assert panel.lines[0].get_xydata().tolist() == studies.GROUND["pareto"]


def test_the_page_shows_the_figure_and_links_its_files(tmp_path: Path):
    report = study_report(studies.toy(tmp_path / "toy"))
    pictures = {path.stem: path.read_bytes() for path in write_trajectories(report, tmp_path)}
    text = page(report, pictures=pictures)
    assert '<section aria-labelledby="h-trajectories" id="trajectories">' in text
    assert 'src="data:image/png;base64,' in text
    for name in ("trajectories.png", "trajectories.svg"):
        assert f'href="{name}"' in text
        assert (tmp_path / name).is_file()
    assert 'id="trajectories"' not in page(report)
