"""The data frames of `gradsurg.load_study`."""

from pathlib import Path

import polars as pl
import pytest

import gradsurg as gs
from tests.report.studies import SITES, log, plan, whole


def test_a_study_is_four_data_frames_that_share_run_arm_and_seed(tmp_path: Path) -> None:
    control = whole(tmp_path, "none", 0, 0.9)
    whole(tmp_path, "clip", 0, 0.25, control)
    study = gs.load_study(tmp_path)
    clip = pl.col("arm") == "clip"
    assert study.runs.filter(clip)["test/accuracy"].to_list() == [0.25]
    assert study.runs.filter(clip)["config.transform.clip.value"].to_list() == [0.01]
    assert study.metrics.filter(clip)["step"].to_list() == [10, 20, 30, 40]
    assert set(study.effects.filter(clip)["site"]) == set(SITES)
    assert study.conflicts.is_empty()
    assert repr(study).startswith("StudyTables of 2 runs in 2 arms (clip, control), with ")
    assert all({"run", "arm", "seed"} <= {*rows.columns} for rows in vars(study).values())


def test_a_log_that_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path) -> None:
    place = plan(tmp_path, "clip", 0)
    log(place, "clip")
    (place.path / "effects.jsonl").write_text("{\n{}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="left out, because it cannot be read: clip-seed0"):
        study = gs.load_study(str(tmp_path))
    assert study.effects.is_empty()
    assert len(study.runs) == 1


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no runs in it"):
        gs.load_study(tmp_path)
