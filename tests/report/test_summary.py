"""gradsurg.report.summary: what is said of a study, as text, at the end of a sweep."""

from pathlib import Path

import pytest

from gradsurg.report import summary
from gradsurg.report.__main__ import main
from gradsurg.report.answer import short_verdict
from gradsurg.report.load import NotAStudy
from gradsurg.report.study import study_report
from tests.report import studies


def test_it_is_what_the_command_prints_but_for_the_page(tmp_path: Path, capsys) -> None:
    study = studies.chain(tmp_path / "first")
    text = summary(study)
    assert not (study / "report").exists()
    assert main([str(study)]) == 0
    assert capsys.readouterr().out == f"{text}\nreport: {study / 'report' / 'index.html'}\n"


def test_it_can_be_of_some_runs_and_their_controls(tmp_path: Path) -> None:
    study = studies.mixed(tmp_path / "first")
    clip = [path.name for path in study.glob("clip-seed*")]
    text = summary(study, only=clip)
    assert "6 runs: 6 finished" in text
    assert "zero" not in text
    assert "lower in 2 and higher in 1 of 3 seeds" in " ".join(text.split())


def test_a_run_that_is_not_there_is_said(tmp_path: Path) -> None:
    study = studies.mixed(tmp_path / "first")
    with pytest.raises(NotAStudy, match="has no run clip-seed9$"):
        summary(study, only=["clip-seed9"])


def test_the_verdict_of_the_page_names_divergence_and_all_metrics(tmp_path: Path) -> None:
    report = study_report(studies.mixed(tmp_path / "first"))
    text = short_verdict(report.outcomes, report.arms)
    assert text.startswith("1 of 3 seeds diverged with zero, 0 of 3 in the control arm")
    assert "not clearly different with clip (higher in 1, lower in 2 of 3 seeds; median -6" in text
    assert text.endswith("Train loss is identical with 2 arms.")
    assert short_verdict([], report.arms) == ""
