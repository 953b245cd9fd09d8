"""When seeds got to what they were trained until, beside their control, by numbers made by hand."""

from collections.abc import Mapping
from pathlib import Path

from gradsurg.report.charts import rows_of
from gradsurg.report.html import page
from gradsurg.report.outcome_charts import reached_panel
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


def test_a_seed_that_never_got_there_counts_as_latest(tmp_path: Path) -> None:
    said = told(
        tmp_path,
        {"clip": [10, 16, 22, 30, None, None], "none": [20, 24, 32, None, 36, None]},
    )
    # sooner in four, later in one, and in one neither got there: p = 2 * (1 + 5) / 2^5
    expected = (
        "clip got there sooner than the control arm in 4 of 6 seeds, later in 1; a seed that never "
        "did counts as latest; exact sign test p 0.375. Difference in steps where both did, 3 "
        "seeds: median -10 (-10 to -8)."
    )
    for text in said:
        assert expected in text
        assert text.index("seeds reached") < text.index(expected)


def test_a_seed_that_diverged_never_got_there(tmp_path: Path) -> None:
    said = told(tmp_path, {"clip": [10, "diverged"], "none": [1210, 20]})
    for text in said:
        assert "clip: 1 of 2 seeds reached test/loss <= 0.5, at step 10." in text
        assert "in 1 of 2 seeds, later in 1;" in text
        assert "Difference in steps where both did, 1 seed: median -1,200." in text


def test_where_no_seed_got_there_in_both_arms_all_count(tmp_path: Path) -> None:
    said = told(tmp_path, {"clip": [10, 20, 30, 40, 50, 60], "none": [None] * 6})
    for text in said:
        assert "in 6 of 6 seeds, later in 0; a seed that never did counts as latest; " in text
        assert "exact sign test p 0.0312. Outcomes" in text


def test_the_figure_has_the_share_of_seeds_over_the_steps(tmp_path: Path) -> None:
    told(tmp_path, {"clip": [10, 16, None, "diverged"], "none": [20, None, None, None]})
    panel = reached_panel(study_report(tmp_path).arms)
    assert panel is not None
    rows = [(row["arm"], row["step"], row["share"]) for row in rows_of(panel.data["reached"])]
    clip = [(0, 0), (10, 0.25), (16, 0.5), (40, 0.5)]
    assert rows[:4] == [("clip (n = 4)", *point) for point in clip]
    assert rows[4:] == [("control (n = 4)", *point) for point in [(0, 0), (20, 0.25), (40, 0.25)]]
    assert panel.title == f"Seeds that reached {AIM}"
    assert "Steps to the target" in page(study_report(tmp_path))
