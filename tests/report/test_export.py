"""The files of a report, the rows for loggers, and what was trained."""

import json
from pathlib import Path
from threading import Thread

import polars as pl
import pytest

from gradsurg.experiment.files import locked
from gradsurg.experiment.run_directory import REPORT_LOCK
from gradsurg.report.compare import compare
from gradsurg.report.experiment import commands, experiment
from gradsurg.report.export import PAGE, WRITTEN, study_info, write_report
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import read_study
from gradsurg.report.verdict import sentence
from tests.report import studies
from tests.report.sentences import with_both_controls


def test_a_report_replaces_what_the_last_one_wrote_and_leaves_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_report(read_study(studies.clashing(tmp_path / "first")), out, figures=False)
    conflicts = pl.read_parquet(out / "conflicts.parquet")
    assert (len(conflicts), conflicts.columns[:4]) == (16, ["run", "arm", "seed", "state"])
    assert {"cosines", "others.mgda.cosine", "others.mgda.weights"} < set(conflicts.columns)
    (out / "mine.txt").write_text("kept", encoding="utf-8")
    (out / WRITTEN).write_text(json.dumps(["conflicts.parquet", "../first"]), encoding="utf-8")
    study = read_study(studies.paired(tmp_path / "second", "clip", [0.1, 0.2, 0.3] * 2))
    assert write_report(study, out, figures=False) == out / PAGE
    frames = {f"{name}.parquet" for name in ("runs", "comparison", "effects")}
    names = {path.name for path in out.iterdir()}
    assert names == {*frames, PAGE, "outcome.md", "outcome.tex", "mine.txt", WRITTEN}
    assert (tmp_path / "first").is_dir()
    assert len(pl.read_parquet(out / "runs.parquet")) == 12
    assert pl.read_parquet(out / "comparison.parquet").filter(metric="test/accuracy")["n"][0] == 6
    assert "clip raises test accuracy" in (out / "outcome.md").read_text(encoding="utf-8")
    assert r"\toprule" in (out / "outcome.tex").read_text(encoding="utf-8")


def test_direction_and_size_are_a_table_of_their_own(tmp_path: Path) -> None:
    study = with_both_controls(tmp_path / "first")
    write_report(study, tmp_path / "out", figures=False)
    parts = pl.read_parquet(tmp_path / "out" / "parts.parquet")
    assert parts["part"].to_list() == ["total", "direction", "size"]
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert "direction +0.01 pp" in page


def test_a_report_folder_of_the_study_that_is_a_link_is_refused(tmp_path: Path) -> None:
    study = read_study(studies.paired(tmp_path / "first", "clip", [0.1]))
    (tmp_path / "private").mkdir()
    (tmp_path / "first" / "report").symlink_to(tmp_path / "private")
    with pytest.raises(OSError, match="is a link; name its target with --out"):
        write_report(study, tmp_path / "first" / "report")
    assert list((tmp_path / "private").iterdir()) == []


@pytest.mark.parametrize("names", ['["mine"]', '[["mine"], null, "a\\u0000", ".", ".."]', "3"])
def test_a_list_that_names_folders_and_nonsense_removes_nothing(tmp_path: Path, names: str) -> None:
    study = read_study(studies.paired(tmp_path / "first", "clip", [0.1]))
    (tmp_path / "out" / "mine").mkdir(parents=True)
    (tmp_path / "out" / WRITTEN).write_text(names, encoding="utf-8")
    assert write_report(study, tmp_path / "out", figures=False).is_file()
    assert (tmp_path / "out" / "mine").is_dir()


@pytest.mark.parametrize("content", ["{half", "[" * 100_000])
def test_a_list_that_is_no_json_is_one_line_that_names_it(tmp_path: Path, content: str) -> None:
    study = read_study(studies.paired(tmp_path / "first", "clip", [0.1]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WRITTEN).write_text(content, encoding="utf-8")
    with pytest.raises(OSError, match=rf"^\{WRITTEN} cannot be read: .*; remove .*\{WRITTEN}$"):
        write_report(study, tmp_path / "out", figures=False)


def test_a_report_waits_for_another_and_removes_the_draft_of_a_killed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = read_study(studies.paired(tmp_path / "first", "clip", [0.1]))
    out = tmp_path / "out"
    (out / ".draft-dead").mkdir(parents=True)
    (out / ".draft-dead" / PAGE).touch()
    with locked(out / REPORT_LOCK, wait=True):
        (out / ".draft-alive").mkdir()
        writing = Thread(target=write_report, args=(study, out, False))
        writing.start()
        while not caplog.messages:
            assert (out / ".draft-alive").is_dir()
            assert writing.is_alive()
    writing.join()
    assert (out / PAGE).is_file()
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [WRITTEN]


def test_loggers_get_the_verdict_the_experiment_and_the_files_of_a_report(tmp_path: Path) -> None:
    folder = studies.paired(tmp_path / "first", "clip", [0.1 + 0.01 * one for one in range(6)])
    study = read_study(folder)
    page = write_report(study, tmp_path / "out", figures=False)
    info = study_info(study, tmp_path / "out")
    assert info.verdict == sentence(compare(study), study)
    assert info.verdict.startswith("clip raises test accuracy by 12.50 pp")
    assert info.config["transform"] == "clip: value 0.01"
    assert "command" in info.config
    assert [*info.files] == [page, tmp_path / "out" / "comparison.parquet"]
    assert all(path.is_file() for path in info.files)
    (config,) = info.surgery.values()
    assert isinstance(config, dict)
    assert config["transform"] == {"clip": {"name": "clip", "value": 0.01}}
    assert len(info.environment) == 1


@pytest.mark.slow
def test_figures_are_files_of_three_kinds_and_loggers_get_them_with_the_comparison(
    tmp_path: Path,
) -> None:
    folder, out = studies.clashing(tmp_path / "first", 2, ("pcgrad",)), tmp_path / "out"
    write_report(read_study(folder), out)
    info = study_info(read_study(folder), out)
    drawn = ["conflict-decrease", "conflict-weight", "conflicts", "curves", "outcome"]
    assert [name for name, _ in info.figures] == drawn
    for _, path in info.figures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in path.with_suffix(".svg").read_text(encoding="utf-8")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    (row,) = [row for row in info.rows if row["metric"] == "test/accuracy"]
    told = {"arm": "pcgrad", "seeds": 2, "of": 2, "against": "control", "not compared": ""}
    assert told.items() < row.items()
    assert row["difference"] == pytest.approx(0.05)


def test_the_experiment_has_its_settings_and_the_command_of_a_sweep(tmp_path: Path) -> None:
    for label, size in (("clip", 64), ("sign", 8)):
        more = {"optimizer": {"name": label.upper()}, "accumulate": 1, "precision": "bfloat16"}
        studies.whole(tmp_path, label, 0, 0.9, batch_size=size, **more)
    facts = dict(experiment(read_study(tmp_path)))
    assert facts["transform"] == "clip: value 0.01, or sign: value 0.01"
    assert facts["optimizer"] == "CLIP, or SIGN"
    assert facts["training"] == "40 steps, batches of 8, 64, precision bfloat16, seeds 0"
    assert facts["command"].startswith("not recorded")  # these runs have none
    jobs = [
        ("transform=clip", f"lr={lr}", f"optimizer={name}", "force=true")
        for lr in ("0.1", "0.01")
        for name in ("sgd", "adam")
    ]
    runs = [LoadedRun(tmp_path, "finished", command=job) for job in jobs]
    told = "python -m gradsurg.run -m transform=clip lr=0.01,0.1 optimizer=adam,sgd"
    assert commands(runs) == [told]
    assert len(commands(runs[:3])) == 3
