"""When seeds got to what they were trained until, beside their control, by numbers made by hand."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gradsurg.report.study import study_report
from gradsurg.report.text import Runs, report
from gradsurg.training.run_directory import RunDirectory
from tests.report.studies import plan

AIM = "test/loss <= 0.5"
Steps = Mapping[str, int | str | None]  # by label and seed; None did not get there


def ended(folder: Path, label: str, seed: int, step: int | str | None, control: str | None) -> Path:
    place = plan(folder, label, seed, control)
    state = step if isinstance(step, str) else "finished"
    told = {
        "until": AIM,
        "until/reached": int(isinstance(step, int)),
        "test/loss": 0.5 - seed / 1e9,
    }
    told |= {"until/step": step} if isinstance(step, int) else {}
    arm = "control" if label == "none" else "treated"
    summary = {"state": state, "label": label, "arm": arm, "seed": seed, "steps": 40}
    RunDirectory(place.path).write_summary({**summary, **told, "effects_every": 0})
    return place.path


def told(folder: Path, arms: Mapping[str, list[int | str | None]]) -> tuple[str, str]:
    """What the page and the terminal say of the first arm; None did not get there."""
    controls = [ended(folder, "none", seed, step, None) for seed, step in enumerate(arms["none"])]
    own = {}
    for label, steps in arms.items():
        if label != "none":
            beside = [control.name for control in controls]
            own[label] = [
                ended(folder, label, seed, step, beside[seed]) for seed, step in enumerate(steps)
            ]
    first = next(iter(own.values()))
    pairs = [Runs(*both) for both in zip(first, controls, strict=True)]
    return study_report(folder).answer, " ".join(report(pairs).split())


def test_the_steps_are_compared_seed_by_seed_where_both_arms_got_there(tmp_path: Path) -> None:
    said = told(
        tmp_path,
        {"clip": [10, 16, 22, 30, None, None], "none": [20, 24, 32, None, 36, None]},
    )
    # -10, -8 and -10: their mean, and 4.303 times their standard error, 0.667
    expected = (
        "clip: the step that gets there is lower than in the control arm: -9.3, 95 % interval "
        "-12.2 to -6.5 (3 seeds, paired t). Fewer than 6 seeds cannot reach p < 0.05 in a "
        "sign-flip test. Sign-flip p 0.25. Left out: 1 seed got there in clip alone, 1 seed got "
        "there in the control arm alone and 1 seed got there in neither arm."
    )
    for text in said:
        assert expected in text
        assert text.index("seeds reached") < text.index(expected)


def test_a_seed_that_diverged_is_counted_apart(tmp_path: Path) -> None:
    said = told(tmp_path, {"clip": [10, "diverged"], "none": [1210, 20]})
    expected = (
        "clip: the step that gets there -1,200 against the control arm; one seed: no interval."
    )
    for text in said:
        assert f"{expected} Left out: 1 seed diverged." in text


def test_where_no_seed_got_there_in_both_arms_that_is_said(tmp_path: Path) -> None:
    said = told(tmp_path, {"clip": [10, 20], "none": [None, None]})
    for text in said:
        assert "clip: no seed got there in both arms: 2 seeds got there in clip alone." in text


def test_several_arms_have_a_q(tmp_path: Path) -> None:
    arms = {"clip": [10, 12], "sign": [30, 38], "none": [20, 24]}
    page, printed = told(tmp_path, arms)
    assert "Sign-flip p 0.5, q 0.5." in page
    assert page.count("the step that gets there") == 2
    assert "q 0" not in printed


@pytest.mark.parametrize("steps", [[10, 20], [None, None]])
def test_without_a_control_nothing_is_compared(tmp_path: Path, steps: list[int | None]) -> None:
    for seed, step in enumerate(steps):
        ended(tmp_path, "clip", seed, step, None)
    said = study_report(tmp_path).answer
    assert "seeds reached" in said
    assert "got there" not in said
    assert "gets there" not in said
