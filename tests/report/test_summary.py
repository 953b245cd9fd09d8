"""gradsurg.report.summary: what is said of a study, as text, at the end of a sweep."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg.report import summary
from gradsurg.report.__main__ import main
from gradsurg.report.answer import short_verdict
from gradsurg.report.load import NotAStudy
from gradsurg.report.study import study_report
from gradsurg.report.text import _folded
from tests.report import studies


def test_it_is_what_the_command_prints_but_for_the_page(tmp_path: Path, capsys) -> None:
    study = studies.chain(tmp_path / "first")
    text = summary(study)
    assert not (study / "report").exists()
    assert main([str(study)]) == 0
    assert capsys.readouterr().out == f"{text}\nreport: {study / 'report' / 'index.html'}\n"


def test_it_is_plain_and_at_most_100_wide(tmp_path: Path) -> None:
    lines = summary(studies.mixed(tmp_path / "first")).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() and line.isprintable() for line in lines)


def test_numbers_of_seeds_and_names_of_arms_are_not_broken(tmp_path: Path) -> None:
    for model in ("mlp", "convnet"):
        more = {"model": {"name": model}}
        control = studies.whole(tmp_path, "none", 0, 0.9, **more)
        other = studies.whole(tmp_path, "none", 1, 0.9, **more)
        for label in ("clip", "sign", "zero"):
            for seed, beside in enumerate((control, other)):
                studies.whole(tmp_path, label, seed, 0.8 + seed / 100, beside, **more)
        studies.plan(tmp_path, "zero", 2, control, **more)  # so that a reading is long
    lines = summary(tmp_path).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("zero, convnet ")]
    assert [row.split()[2:4] for row in rows] == [["0/2", "80.50%"], ["0/2", "0.5"]]
    for width in range(20, 60):
        folded = _folded("No clear difference for clip, mlp (n = 2) and sign, mlp (n = 2).", width)
        assert folded.count("(n = 2)") == 2
        assert max(map(len, folded.splitlines())) <= width


def test_shares_and_updates_are_said_as_at_the_end_of_a_job(tmp_path: Path) -> None:
    text = summary(studies.chain(tmp_path))
    for words in (
        "clip+noise. Each link's share in test accuracy, the chain minus the chain without it:",
        "noise  -12.00 pp",
        "clip: Updates (8 steps of 2 runs), beside those without the surgery: cosine 0.625,",
    ):
        assert words in text


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


def test_a_study_of_planned_runs_alone_is_said_in_full(tmp_path: Path) -> None:
    studies.plan(tmp_path, "clip", 0, studies.plan(tmp_path, "none", 0).path.name)
    text = summary(tmp_path)
    assert "0 of 2 runs finished" in text
    assert text.count("not started") == 2


@pytest.mark.slow
def test_it_draws_nothing(tmp_path: Path) -> None:
    study = studies.mixed(tmp_path / "first")
    code = (
        "import sys\nfrom pathlib import Path\nfrom gradsurg.report import summary\n"
        f"assert 'paired t' in summary(Path({str(study)!r}))\n"
        "print(sorted({'matplotlib', 'torch', 'hydra'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_verdict_of_the_page_names_divergence_and_all_metrics(tmp_path: Path) -> None:
    report = study_report(studies.mixed(tmp_path / "first"))
    text = short_verdict(report.outcomes, report.arms)
    assert text.startswith("1 of 3 seeds diverged with zero, 0 of 3 in the control arm")
    assert "not clearly different with clip (higher in 1, lower in 2 of 3 seeds; median -6" in text
    assert text.endswith("Train loss is identical with 2 arms.")
    assert short_verdict([], report.arms) == ""
