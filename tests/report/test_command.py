"""python -m gradsurg.report: its words, its files and its exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg.report.__main__ import main
from gradsurg.report.study import read_study
from gradsurg.report.terminal import overview
from tests.report import studies


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return studies.mixed(tmp_path_factory.mktemp("runs") / "first")


def test_the_overview_and_the_page_are_printed(study: Path, capsys) -> None:
    assert main([str(study)]) == 0
    page = study / "report" / "index.html"
    assert page.is_file()
    text = overview(read_study(study))
    assert capsys.readouterr().out == f"{text}\nreport: {page}\n"


def test_a_margin_is_asked_for(tmp_path: Path, capsys) -> None:
    folder = studies.paired(tmp_path / "a", "clip", [0.0, 0.001, -0.001, 0.002, 0.001, 0.0])
    assert main([str(folder), "--margin", "0.5pp", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "equivalent in test accuracy within 0.50 pp" in " ".join(printed.split())
    assert (tmp_path / "out" / "index.html").is_file()
    assert "equivalent" in (tmp_path / "out" / "outcome.md").read_text("utf-8")
    assert main([str(folder), "--margin", "wide"]) == 2
    assert capsys.readouterr().err.startswith("margin needs a positive number")


def test_arms_are_compared_with_each_other(study: Path, capsys) -> None:
    assert main([str(study), "--compare", "clip", "zero"]) == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert said.startswith("0 of 3 seeds diverged with clip and 1 with zero")
    assert "+11.50 pp (range over 2 seeds +10.00 to +13.00" in said
    heads = next(line for line in text.splitlines() if line.startswith("arm "))
    assert {"first", "second", "range"} <= {*heads.split()}
    assert "\n\ntrain loss\n" in text
    assert main([str(study), "--compare"]) == 0
    assert "zero - control" in capsys.readouterr().out
    assert main([str(study), "--compare", "clip", "clop"]) == 2
    assert capsys.readouterr().err.startswith("no arm is named 'clop'; the arms are: 'clip'")


def test_figures_for_a_paper_are_written_instead_of_the_report(tmp_path: Path, capsys) -> None:
    folder = studies.paired(tmp_path / "a", "clip", [0.01, 0.02])
    out = tmp_path / "paper"
    words = ["--metric", "test accuracy", "--arms", "clip", "--style", "serif", "--spread", "sd"]
    assert main([str(folder), "--paper", str(out), *words]) == 0
    assert capsys.readouterr().out.endswith(f"files in {out}: outcome-3.3in.pdf .. table.tex\n")
    assert r"$51.50\%$ $\pm$ $0.71\%$ &" in (out / "table.tex").read_text("utf-8")
    assert not (folder / "report").exists()
    assert main([str(folder), "--metric", "test/loss"]) == 2
    assert capsys.readouterr().err == "--metric: needs --paper FOLDER\n"


@pytest.mark.parametrize("words", [[], ["--compare"]])
def test_a_wrong_folder_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where no `runs` has a study to suggest
    assert main([str(tmp_path / "nowhere"), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"there is no folder '{tmp_path / 'nowhere'}'\n"
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_folder_gets_the_study_in_runs_that_was_meant(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studies.paired(tmp_path / "runs" / "digits-mlp", "clip", [0.01])
    study = Path("runs/digits-mlp")
    for wrong in (f"{study}x", study.name, "nothing"):
        assert main([wrong]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == f"did you mean '{study}'? There is no folder '{study}x'."
    assert second == f"did you mean '{study}'? There is no folder '{study.name}'."
    assert third == f"there is no folder 'nothing'. There are: {study}."


def test_a_report_that_cannot_be_written_is_one_line_below_the_overview(
    tmp_path: Path, capsys
) -> None:
    folder = studies.paired(tmp_path, "clip", [0.01])
    (folder / "file").write_text("", "utf-8")
    assert main([str(folder), "--out", str(folder / "file")]) == 2
    printed = capsys.readouterr()
    assert "+1.00 pp" in printed.out
    assert printed.err.startswith("the report cannot be written: ")
    assert printed.err.endswith("; --out FOLDER writes it elsewhere\n")


@pytest.mark.parametrize("make", ["planned", "control only", "one seed", "no effects"])
def test_a_study_that_has_hardly_begun_is_reported(tmp_path: Path, make: str, capsys) -> None:
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
    assert f"{1 if make == 'control only' else 2} run" in capsys.readouterr().out


@pytest.mark.slow
def test_torch_is_not_imported_and_altair_for_the_page_alone(study: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from gradsurg.report import summary
from gradsurg.report.__main__ import main
assert "test accuracy" in summary({str(study)!r})
assert "altair" not in sys.modules
assert main([{str(study)!r}, "--out", {str(tmp_path)!r}]) == 0
assert not {{"torch", "hydra", "wandb"}} & {{*sys.modules}}
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
