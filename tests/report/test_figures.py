"""The figures, by what they draw."""

from pathlib import Path

from gradsurg.report.figures import _curves, _limits, draw_outcome, write_figures
from gradsurg.report.study import study_report
from tests.report import studies


def pairs(folder: Path, steps: int) -> Path:
    """Two seeds of clip, whose interval is huge, and of the control."""
    controls: list[str | None] = [None, None]
    for label, accuracies in {"none": (0.5, 0.5), "clip": (0.5, 0.7)}.items():
        for seed, accuracy in enumerate(accuracies):
            place = studies.plan(folder, label, seed, controls[seed])
            studies.log(place, label, steps=steps)
            studies.end(place, label, accuracy)
            controls[seed] = controls[seed] or place.path.name
    return folder


def test_an_interval_far_from_all_seeds_is_cut_with_an_arrow_at_both_ends(tmp_path: Path) -> None:
    report = study_report(pairs(tmp_path, 40))
    accuracy = [outcome for outcome in report.outcomes if outcome.metric == "test/accuracy"]
    low, high = _limits(accuracy)
    assert -0.13 < low < -0.1  # half of 0 to 0.2 more at each end, and a little room
    assert 0.3 < high < 0.33
    figure = draw_outcome(report)
    assert figure is not None
    markers = [line.get_marker() for line in figure.axes[0].lines]
    assert (markers.count("<"), markers.count(">")) == (1, 1)
    same = [line.get_marker() for line in figure.axes[1].lines]  # of train loss: all alike
    assert not {"<", ">"} & set(same)


def test_a_curve_of_one_point_is_a_dot(tmp_path: Path) -> None:
    for steps, dots in ((10, 2), (40, 0)):
        figure = _curves(study_report(pairs(tmp_path / str(steps), steps)))
        assert figure is not None
        assert [line.get_marker() for line in figure.axes[0].lines].count("o") == dots


def test_a_name_in_another_script_warns_nobody(tmp_path: Path, recwarn) -> None:
    report = study_report(pairs(tmp_path, 10))
    arm = report.outcomes[0].arm
    object.__setattr__(arm, "name", "剪裁")
    write_figures(report, tmp_path)
    assert [str(one.message) for one in recwarn] == []
