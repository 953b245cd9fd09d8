"""The charts of a study: their data, their limits, and the files they are written to."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.charts import DARK, TASKS, Panel, rows_of
from gradsurg.report.figures import Figure, figure_spec, figures, write_figure
from gradsurg.report.outcome_charts import (
    limits_of,
    of_metric,
    outcome_panel,
)
from gradsurg.report.study import StudyReport, study_report
from gradsurg.report.training_charts import curve_data, curve_limits, overlay_panel
from tests.report import studies


def pairs(folder: Path, steps: int) -> StudyReport:
    """Three seeds of the control and of clip, whose interval is huge."""
    controls: list[str | None] = [None, None, None]
    for label, accuracies in {"none": (0.5, 0.5, 0.5), "clip": (0.5, 0.5, 0.7)}.items():
        for seed, accuracy in enumerate(accuracies):
            place = studies.plan(folder, label, seed, controls[seed])
            studies.log(place, label, steps=steps)
            studies.end(place, label, accuracy)
            controls[seed] = controls[seed] or place.path.name
    return study_report(folder)


def forest(report: StudyReport, metric: str) -> Panel:
    return outcome_panel(of_metric(report.outcomes, metric), metric)


def test_an_interval_far_from_all_seeds_is_cut_with_an_arrow_at_both_ends(tmp_path: Path) -> None:
    report = pairs(tmp_path, 40)
    low, high = limits_of(of_metric(report.outcomes, "test/accuracy"))
    assert -0.13 < low < -0.1  # half of 0 to 0.2 more at each end, and a little room
    assert 0.3 < high < 0.33
    panel = forest(report, "test/accuracy")
    assert studies.columns(panel, "cuts")["shape"] == ["triangle-left", "triangle-right"]
    assert (studies.columns(panel, "arms")["from"], studies.columns(panel, "arms")["to"]) == (
        [pytest.approx(low, rel=1e-4)],
        [pytest.approx(high, rel=1e-4)],
    )
    assert (
        studies.columns(forest(report, "train/loss"), "cuts")["shape"] == []
    )  # all seeds are alike


def test_the_forest_plot_has_the_differences_of_the_arms_and_of_their_seeds(tmp_path: Path) -> None:
    report = study_report(studies.mixed(tmp_path / "first"))
    panel = forest(report, "test/accuracy")
    arms = {row["arm"]: row for row in rows_of(panel.data["arms"])}
    assert arms["clip (n = 3)"]["mean"] == -0.05
    assert arms["clip (n = 3)"]["said"] == "-5.00 pp"
    assert arms["noise (n = 0 of 3)"]["mean"] is None
    seeds = [row for row in rows_of(panel.data["seeds"]) if row["arm"] == "clip (n = 3)"]
    assert [row["difference"] for row in seeds] == [-0.1, -0.06, 0.01]
    assert "clip (n = 3): -5.00 pp" in panel.summary


def test_a_mean_without_a_neighbour_is_drawn_as_a_point(tmp_path: Path) -> None:
    for steps, points in ((10, 2), (40, 0)):
        (one,) = curve_data(pairs(tmp_path / str(steps), steps), "train/loss")
        assert len(studies.columns(one, "points")["step"]) == points
        assert sum(studies.columns(one, "points")["control"]) == points // 2


def test_one_arm_that_explodes_does_not_flatten_the_others(tmp_path: Path) -> None:
    for label, loss in {"none": 1.0, "clip": 1.0, "sign": 1e6}.items():
        place = studies.plan(tmp_path, label, 0)
        studies.log(place, label, loss=loss if label != "sign" else 1.0)
        if label == "sign":
            place.append_metrics({"step": 41, "train/loss": loss})
        studies.end(place, label, 0.5)
    report = study_report(tmp_path)
    low, high = curve_limits(report.curves)
    assert low < 1 / 40
    assert 0.1 <= high < 1
    low, high = curve_limits(report.curves, by_log=True)
    assert 0 < low < 1 / 40 < 0.1 < high < 10


def test_no_number_of_a_view_is_left_open_in_a_file(tmp_path: Path) -> None:
    def expressions(node: Any) -> list[str]:
        if isinstance(node, list):
            return [name for item in node for name in expressions(item)]
        if not isinstance(node, dict):
            return []
        return [*([node["expr"]] if "expr" in node else []), *expressions([*node.values()])]

    study = studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda"))
    for figure in figures(study_report(study)):
        assert expressions(figure_spec(figure)) == []
        assert expressions([panel.view for panel in figure.panels])


def test_every_file_is_written_as_svg_png_and_pdf(tmp_path: Path) -> None:
    drawn = figures(pairs(tmp_path / "first", 40))
    written = [write_figure(figure, tmp_path) for figure in drawn]
    assert [path.name for path in written] == [
        f"{name}.png" for name in ("outcome", "curves", "effects", "norms", "cost")
    ]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in path.with_suffix(".svg").read_text(encoding="utf-8")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert "difference in test accuracy" in (tmp_path / "outcome.svg").read_text(encoding="utf-8")


def test_every_colour_of_a_line_has_one_for_the_dark_theme() -> None:
    assert set(TASKS) <= set(DARK)
    assert len(set(DARK.values())) == len(DARK)


def arms_of(folder: Path) -> StudyReport:
    """Three doses of clip with each of two optimizers, and a control for each optimizer."""
    for name in ("SGD", "Adam"):
        more = {"optimizer": {"name": name}}
        controls = [studies.whole(folder, "none", seed, 0.9, **more) for seed in range(2)]
        for dose in (0.01, 0.1, 1.0):
            for seed, control in enumerate(controls):
                accuracy = 0.8 + dose / 10 + seed / 100
                studies.whole(folder, "clip", seed, accuracy, control, value=dose, **more)
    return study_report(folder)


def svg(panel: Panel) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(figure_spec(Figure("one", [panel], 1)))


def test_all_arms_share_a_panel_with_each_control_once(tmp_path: Path) -> None:
    panel = overlay_panel(arms_of(tmp_path / "first"), "train/loss")
    names = set(studies.columns(panel, "curves")["arm"])
    doses = {f"clip {dose}, {name}" for dose in ("0.01", "0.1", "1") for name in ("SGD", "Adam")}
    assert names == {*doses, "control, SGD", "control, Adam"}
    assert svg(panel).count("optimizer step</text>") == 1


def test_eight_arms_and_their_controls_look_different(tmp_path: Path) -> None:
    for dose in range(8):
        for seed in range(2):
            place = studies.plan(tmp_path, f"clip{dose}", seed)
            studies.log(place, f"clip{dose}", loss=1.0 + dose)
            studies.end(place, f"clip{dose}", 0.5)
    panel = overlay_panel(study_report(tmp_path), "train/loss")
    colours, dashes = panel.limits["colours"], panel.limits["dashes"]
    assert isinstance(colours, list)
    assert isinstance(dashes, list)
    looks = {(colour, *dash) for colour, dash in zip(colours, dashes, strict=True)}
    assert len(looks) == len(colours) == 8


def test_a_curve_that_leaves_the_axis_is_marked_once_and_not_drawn_along_its_edge(
    tmp_path: Path,
) -> None:
    for label, losses in {"none": [1.0] * 30, "clip": [1.0] * 13 + [90.0] * 4 + [1.0] * 13}.items():
        place = studies.plan(tmp_path, label, 0)
        for step, loss in enumerate(losses, 1):
            place.append_metrics({"step": step, "train/loss": loss * (1 + step / 100)})
        studies.end(place, label, 0.5)
    panel = overlay_panel(study_report(tmp_path), "train/loss")
    assert float(str(panel.limits["high"])) < 10
    assert svg(panel).count("L-3.162,2.739L3.162,2.739Z") == 1  # a triangle
    assert '"clamp": true' not in json.dumps(panel.view)
