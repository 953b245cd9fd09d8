"""Figures and tables for a paper, and arms compared with each other."""

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gradsurg.report.__main__ import main
from gradsurg.report.compare import compare_pairs
from gradsurg.report.load import group, read_study
from gradsurg.report.paper import latex
from gradsurg.report.study import commands, experiment, study_report
from tests.report import studies

DOCS = Path(__file__).parents[2] / "docs" / "paper_figures.md"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clipping at two values with two optimizers, two seeds each, and a control for each."""
    folder = tmp_path_factory.mktemp("runs") / "paper"
    for name in ("SGD", "Adam"):
        more = {"optimizer": {"name": name}}
        controls = [studies.whole(folder, "none", seed, 0.9, **more) for seed in range(2)]
        for dose in (0.01, 0.1):
            for seed, control in enumerate(controls):
                accuracy = 0.8 + dose + seed / 100
                place = studies.plan(folder, "clip", seed, control, value=dose, **more)
                studies.log(place, "clip")
                studies.end(place, "clip", accuracy, **{"test/loss": 1e-7 * (1 + seed)})
    return folder


@pytest.mark.slow
def test_the_commands_of_the_page_write_files_of_the_right_size(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "paper").symlink_to(study)
    lines = re.findall("(?m)^python -m gradsurg.report (.*)$", DOCS.read_text(encoding="utf-8"))
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)) == 0
    tables = [path.name for path in sorted((tmp_path / "figures").glob("*.tex"))]
    assert tables == ["table-test-loss.tex", "table-train-loss.tex", "table.tex"]
    narrow = (tmp_path / "figures" / "outcome-3.3in.svg").read_text(encoding="utf-8")
    title = next(part for part in narrow.split("<text") if "percentage points" in part)
    assert 'text-anchor="end"' in title  # centred, it left the figure
    for width in (3.3, 6.8):
        stem = tmp_path / "figures" / f"curves-{width}in"
        header = Path(f"{stem}.png").read_bytes()[:24]
        assert int.from_bytes(header[16:20]) == pytest.approx(300 * width, abs=1)
        assert f'width="{width}in"' in Path(f"{stem}.svg").read_text(encoding="utf-8")[:300]
        content = Path(f"{stem}.pdf").read_bytes()
        box = re.search(rb"/MediaBox \[0 0 ([0-9.]+) ", content)
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * width, abs=1)
        assert b"/FontFile" in content


def test_a_table_has_a_row_an_arm_real_minus_signs_and_a_label(study: Path) -> None:
    text = latex(study_report(study))
    assert r"\label{tab:paper}" in text
    rows = [line.split(" & ")[0] for line in text.splitlines() if line.endswith(r"\\")][1:]
    arms = [f"clip {dose}, {name}" for name in ("SGD", "Adam") for dose in ("0.01", "0.1")]
    assert sorted(rows) == sorted([*arms, "control, SGD", "control, Adam"])
    assert "$-8.50$" in text
    assert "test loss" not in text  # the table of all metrics is wider than a page
    loss = latex(study_report(study), "test/loss", numbered=True)
    assert r"\label{tab:paper-test-loss}" in loss
    assert r"$1.50 \cdot 10^{-7}$" in loss
    assert not re.search(r"[^$\w{-]-\d", text.replace("$-", ""))
    assert r"\pm" in latex(study_report(study), "test/accuracy", "sd")


def has_latex() -> bool:
    if not (shutil.which("pdflatex") and shutil.which("kpsewhich")):
        return False
    found = subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not has_latex(), reason="no pdflatex with booktabs (Debian: texlive-latex-recommended)"
)
def test_a_table_compiles(study: Path, tmp_path: Path) -> None:
    strange = tmp_path / "a_b&c~50% #1"
    shutil.copytree(study, strange)
    loss = latex(study_report(study), "test/loss", "sd", numbered=True)
    tables = [latex(study_report(strange)), loss]
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text("\n".join([head, *tables, r"\end{document}"]), encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "a.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout  # each table is as wide as the text or narrower
    assert (tmp_path / "a.pdf").stat().st_size > 10_000


def test_pairs_of_arms_are_paired_over_seeds_with_one_correction(study: Path) -> None:
    arms = group(read_study(study))
    names = ["clip 0.01, SGD", "clip 0.1, SGD", "control, SGD"]
    outcomes = [one for one in compare_pairs(arms, names) if one.metric == "test/accuracy"]
    assert [one.arm.name for one in outcomes] == [
        f"{a} - {b}" for a, b in ((names[0], names[1]), (names[0], names[2]), (names[1], names[2]))
    ]
    difference = outcomes[0].difference
    assert difference is not None
    assert difference.differences == pytest.approx((-0.09, -0.09))
    assert all(one.q_value is not None for one in outcomes)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--compare", "clip"], "no arm is named 'clip'; the arms are: 'clip 0.01, Adam'"),
        (["--compare", "control, SGD"], "name at least two arms to compare; the arms are: "),
        (["--paper", "out", "--arms", "clip"], "no arm is named 'clip'"),
        (["--paper", "out", "--metric", "los"], "no metric is named 'los'; the metrics are: test/"),
        (["--paper", "/proc/x"], "the figures cannot be written: "),
        (["--style", "serif"], "--style: needs --paper FOLDER"),
    ],
)
def test_a_wrong_name_is_answered_with_those_that_exist(
    study: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study), *words]) == 2
    assert fault in capsys.readouterr().err


def test_the_experiment_has_its_settings_and_the_command_of_a_sweep(study: Path) -> None:
    facts = dict(experiment(read_study(study)))
    assert facts["transform"] == "clip: value 0.01, 0.1"
    assert facts["optimizer"] == "Adam, or SGD"
    assert facts["training"].startswith("40 steps")
    assert facts["command"].startswith("not recorded")  # these runs have none
    jobs = [
        ("transform=clip", f"lr={lr}", f"optimizer={name}", "force=true")
        for lr in ("0.1", "0.01")
        for name in ("sgd", "adam")
    ]
    (run, *_) = read_study(study)
    runs = [replace(run, command=job) for job in jobs]
    assert commands(runs) == [
        "python -m gradsurg.run -m transform=clip lr=0.01,0.1 optimizer=adam,sgd"
    ]
    assert len(commands(runs[:3])) == 3
