"""python -m gradsurg.report: its files, its words, its exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from gradsurg.report.__main__ import main
from gradsurg.report.html import page
from gradsurg.report.study import study_report
from gradsurg.training.run_directory import SUMMARY
from tests.report import studies

FIGURES = ("outcome", "curves", "effects", "norms", "cost")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: Path) -> dict:
    (text,) = DATA.findall(page.read_text(encoding="utf-8"))
    return json.loads(text)


def runs_of(page: Path) -> dict[str, str]:
    """The state of each run in the table of runs, by its name."""
    rows = re.findall(
        r'<tr data-run="([^"]*)" data-state="([^"]*)"', page.read_text(encoding="utf-8")
    )
    return dict(rows)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return studies.mixed(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def report(study: Path) -> Path:
    assert main([str(study)]) == 0
    return study / "report"


def test_all_files_are_there_and_no_draft_is_left(report: Path) -> None:
    expected = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg", "pdf")}
    expected |= {"index.html", "runs.parquet", "effects.parquet", "outcome.md", "outcome.tex"}
    assert {path.name for path in report.iterdir()} == {*expected, ".written.json"}
    assert all((report / name).stat().st_size > 200 for name in expected)


def test_what_an_earlier_report_wrote_and_no_longer_applies_is_removed(tmp_path: Path) -> None:
    control = studies.whole(tmp_path, "none", 0, 0.9)
    run = tmp_path / studies.whole(tmp_path, "clip", 0, 0.8, control)
    report = tmp_path / "report"
    assert main([str(tmp_path)]) == 0
    mine = [report / name for name in ("mine.png", "notes.md")]
    for path in mine:
        path.write_text("mine", encoding="utf-8")
    assert (report / "outcome.png").is_file()
    shutil.rmtree(run)
    assert main([str(tmp_path)]) == 0
    left = {path.name for path in report.iterdir()}
    assert {"index.html", "runs.parquet", "mine.png", "notes.md"} <= left
    assert not {"outcome.png", "outcome.svg", "effects.svg", "cost.png"} & left


@pytest.mark.parametrize("text", ['["../kept.txt", "", "..", ".", "/", 3]', "no json"])
def test_a_list_of_written_files_that_was_tampered_with_removes_nothing_else(
    tmp_path: Path, text: str
) -> None:
    studies.whole(tmp_path, "none", 0, 0.9)
    report = tmp_path / "report"
    report.mkdir()
    (tmp_path / "kept.txt").write_text("kept", encoding="utf-8")
    (report / "kept.txt").write_text("kept", encoding="utf-8")
    (report / ".written.json").write_text(text, encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "kept.txt").is_file()
    assert (report / "kept.txt").is_file()
    assert "index.html" in json.loads((report / ".written.json").read_text(encoding="utf-8"))


def test_the_page_fetches_nothing(report: Path) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text
    # of the library of charts the policy forbids all that would be fetched
    own, library, _ = re.split(
        r"<script>(\(\(\) => \{.*?\}\)\(\);)</script>", text, flags=re.DOTALL
    )
    assert "vega" in library
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:|\.\./)""", own) == []
    assert "http" not in own.replace("http-equiv", "")
    assert len(text) < 3e6


def test_every_run_is_on_the_page_and_in_the_parquet_file(report: Path) -> None:
    runs = runs_of(report / "index.html")
    table = pl.read_parquet(report / "runs.parquet")
    states = ["finished"] * 8 + ["interrupted", "planned", "diverged", "failed", "missing"]
    assert sorted(runs.values()) == sorted(states)
    assert sorted(table["state"]) == sorted(states)
    assert set(table["run"]) == set(runs)
    assert table.schema["config.model.name"] == pl.String
    assert table.schema["test/accuracy"] == pl.Float64
    effects = pl.read_parquet(report / "effects.parquet")
    # eight whole runs of four rows at two sites, and one that stopped half-way
    assert len(effects) == 8 * 4 * 2 + 4
    assert set(effects["arm"].cast(pl.String)) == {"clip", "zero", "noise", "control"}


def test_text_from_files_cannot_end_the_script_or_become_markup(report: Path) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "<b>no</b>" not in text
    assert "&lt;b&gt;no&lt;/b&gt; room" in text
    assert "</" not in DATA.findall(text)[0]


def test_the_answer_begins_with_failed_runs(report: Path) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    _, answer = text.split(">The answer</h2>")
    first = answer.split("</p>")[0]
    assert "of noise failed: ValueError: &lt;b&gt;no&lt;/b&gt; room" in first


def test_the_answer_names_the_transform_that_made_nan(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "noise", 0)
    first = {"transform": "noise", "site": "0.weight", "step": 7}
    studies.end(place, "noise", float("nan"), "diverged", nonfinite=first)
    _, answer = page(study_report(tmp_path)).split(">The answer</h2>")
    assert "at site &#x27;0.weight&#x27;, step 7." in answer.split("</p>")[0]


def test_tables_for_papers_have_a_row_for_each_arm_and_metric(report: Path) -> None:
    lines = (report / "outcome.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + 3 * 2
    (row,) = [row for row in rows if row.startswith("| clip | test accuracy |")]
    assert "| no clear difference | 3 of 3 | 85.00% | 90.00% | 1/3 |" in row
    tex = (report / "outcome.tex").read_text(encoding="utf-8")
    assert r"test accuracy (\%)" in tex
    assert "clip & 3 & $85.00$ [" in tex
    assert len(re.findall(r"(?<!\\)%", tex)) == 1  # the comment at the top


@pytest.mark.parametrize("words", [[], ["--watch"]])
def test_a_wrong_folder_is_one_line_and_exit_code_2(tmp_path: Path, capsys, words) -> None:
    assert main([str(tmp_path / "nowhere"), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"there is no folder {tmp_path / 'nowhere'}\n"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("make", ["planned", "control only", "one seed", "no effects"])
def test_a_study_that_has_hardly_begun_is_reported(tmp_path: Path, make: str) -> None:
    match make:
        case "planned":
            studies.plan(tmp_path, "clip", 0, studies.plan(tmp_path, "none", 0).path.name)
        case "control only":
            studies.whole(tmp_path, "none", 0, 0.9)
        case "one seed":
            studies.whole(tmp_path, "clip", 0, 0.8, studies.whole(tmp_path, "none", 0, 0.9))
        case "no effects":
            control = studies.plan(tmp_path, "none", 0)
            studies.end(control, "none", 0.9)
            studies.end(studies.plan(tmp_path, "clip", 0, control.path.name), "clip", 0.8)
    assert main([str(tmp_path)]) == 0
    assert len(runs_of(tmp_path / "report" / "index.html")) == (1 if make == "control only" else 2)


@pytest.mark.slow
def test_torch_is_not_imported(study: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from gradsurg.report.__main__ import main
from gradsurg.report.html import page
from gradsurg.report.study import study_report
assert main([{str(study)!r}, "--out", {str(tmp_path)!r}]) == 0
print("torch" in sys.modules, "hydra" in sys.modules, "wandb" in sys.modules, file=sys.stderr)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False", "False", "False"]


@pytest.mark.slow
def test_watching_follows_a_study_until_it_is_interrupted(tmp_path: Path) -> None:
    control = studies.whole(tmp_path / "first", "none", 0, 0.9)
    place = studies.plan(tmp_path / "first", "clip", 0, control)
    page = tmp_path / "first" / "report" / "index.html"
    command = [sys.executable, "-m", "gradsurg.report", str(tmp_path / "first"), "--watch"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert "1 finished, 1 planned" in process.stdout.readline()
        assert data_of(page)["refresh"] > 0
        studies.end(place, "clip", 0.8)
        assert (place.path / SUMMARY).is_file()
        assert "2 finished" in process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
    assert data_of(page)["refresh"] is None
    assert set(runs_of(page).values()) == {"finished"}
