"""A damaged or foreign run is one line of the report; nothing outside of the study is touched."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsurg.report.__main__ import main
from gradsurg.report.load import read_study
from gradsurg.report.study import study_report
from tests.report import studies

SECRET = "a line of somebody else"

DAMAGES = {
    "summary.json": ["", "null", "{half", '{"state": "finished", "test/accuracy": "0.9"}'],
    "run.json": ["null", '{"controls": [1]}', '{"seed": "0"}', '{"measured": [1]}'],
    "config.yaml": ["a: [", "3", "a: !!x 3"],
    "metrics.jsonl": ["null\n", '{"step": "x"}\n'],
    "effects.jsonl": ["3\n", '{"step": 1, "site": "a", "transform": "b", "cosine": "x"}\n'],
    "conflicts.jsonl": ['{"step": [1]}\n', '{"step": 5}\n'],
    "landscape.json": ['{"axes": []}'],
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two seeds of clip and of the control, beside a folder of somebody else."""
    (tmp_path / "private").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "run.json", "index.html"):
        (tmp_path / "private" / name).write_text(f"{SECRET}: 1\n", encoding="utf-8")
    for seed in range(2):
        control = studies.whole(tmp_path / "first", "none", seed, 0.9)
        studies.whole(tmp_path / "first", "clip", seed, 0.8, control)
    return tmp_path / "first"


def run_of(study: Path, label: str = "clip", seed: int = 0) -> Path:
    (path,) = study.glob(f"{label}-seed{seed}-*")
    return path


def private(study: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (study.parent / "private").iterdir()}


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in DAMAGES.items() for text in texts]
)
def test_a_broken_file_is_one_line_and_the_others_are_compared(
    study: Path, name: str, content: str
) -> None:
    (run_of(study) / name).write_text(content, encoding="utf-8")
    report = study_report(study)
    told = [run.reason for run in report.runs if run.state == "unreadable"] + report.cautions
    assert [name in line for line in told].count(True) == 1
    assert "\n" not in "".join(told)
    assert "-10.00 pp" in report.answer  # of the other seed


@pytest.mark.parametrize("control", ["../private", "..", "", "/etc", "a/b", ["x"]])
def test_a_control_outside_of_the_study_is_refused(study: Path, control: object) -> None:
    file = run_of(study) / "run.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**facts, "control": control}), encoding="utf-8")
    runs = read_study(study)
    assert len(runs) == 4
    (broken,) = [run for run in runs if run.state == "unreadable"]
    assert broken.path == run_of(study)
    assert broken.reason.startswith("run.json control: ")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "run.json"])
def test_a_link_to_a_file_elsewhere_is_refused_and_not_shown(study: Path, name: str) -> None:
    file, before = run_of(study) / name, private(study)
    file.unlink()
    file.symlink_to(study.parent / "private" / name)
    (broken,) = [run for run in read_study(study) if run.state == "unreadable"]
    assert broken.reason == f"{name} is a link to a place outside of the study"
    assert private(study) == before


def test_a_run_that_is_a_link_to_a_folder_elsewhere_is_refused(study: Path) -> None:
    (study / "clip-seed5-12345678").symlink_to(study.parent / "private")
    states = {run.name: run.state for run in read_study(study)}
    assert states["clip-seed5-12345678"] == "unreadable"


def test_a_report_that_is_a_link_is_not_written_to(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study / "report").symlink_to(study.parent / "private")
    before = private(study)
    assert main([str(study)]) == 2
    output = capsys.readouterr()
    assert "test accuracy" in output.out
    assert output.err.count("\n") == 1
    assert "--out" in output.err
    assert private(study) == before


def test_control_characters_reach_no_terminal_and_names_are_no_markup(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_of(study) / "run.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    label = "\x1b[2J [x](https://evil.example) <script>alert(1)</script> | `a` www.evil.example"
    file.write_text(json.dumps({**facts, "label": label}), encoding="utf-8")
    failed = studies.plan(study, "noise", 0)
    failed.write_error("Traceback:\n  x\nValueError: \x1b[31mred\n")
    (study / "noise-seed1-\x1b[31m").mkdir()
    (study / "noise-seed1-\x1b[31m" / "config.yaml").touch()
    assert main([str(study)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"\x1b[31mred" in printed
    text = (study / "report" / "outcome.md").read_text(encoding="utf-8")
    assert r"\[x\](https:\//evil.example) \<script\>alert(1)\</script\> \| \`a\` www\." in text
    page = (study / "report" / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert not any(SECRET.encode() in path.read_bytes() for path in (study / "report").iterdir())


def test_a_full_disk_is_one_line_and_the_old_report_stays(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study / "report").mkdir()
    (study / "report" / "index.html").write_text("before", encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        assert main([str(study)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    ended = capsys.readouterr()
    assert "test accuracy" in ended.out
    assert ended.err.startswith("the report cannot be written: ")
    assert ended.err.count("\n") == 1
    (left,) = (study / "report").iterdir()
    assert left.read_text(encoding="utf-8") == "before"


def test_a_study_that_cannot_be_written_to_is_reported_elsewhere(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study / "report").write_text("in the way", encoding="utf-8")  # root may write everywhere
    assert main([str(study)]) == 2
    assert capsys.readouterr().err.startswith("the report cannot be written: ")
    assert main([str(study), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "index.html").is_file()


WORDS = ["transform=clip", "steps=4", "logger=none", "report=false", "out=runs"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("summary.json", "{half", marks=pytest.mark.slow),
        pytest.param("metrics.jsonl", '["step"]\n', marks=pytest.mark.slow),
        pytest.param("run.json", "3", marks=pytest.mark.slow),
        ("config.yaml", "a: ["),
    ],
)
def test_a_command_with_a_broken_run_finishes_the_others(
    here: Callable, tmp_path: Path, name: str, text: str
) -> None:
    words = [*WORDS, "seeds=2"]
    assert here(*words).code == 0
    study = tmp_path / "runs" / "digits-mlp"
    (run_of(study) / name).write_text(text, encoding="utf-8")
    (run_of(study, seed=1) / "summary.json").unlink()
    ended = here(*words)
    assert ended.code in (0, 1)
    assert "Traceback" not in ended.err
    assert (run_of(study, seed=1) / "summary.json").is_file()
    assert name in ended.err + ended.out or (name, ended.code) == ("run.json", 0)


def test_a_command_writes_through_no_link_out_of_the_study(here: Callable, tmp_path: Path) -> None:
    target = tmp_path / "private"
    target.write_text(SECRET, encoding="utf-8")
    words = [*WORDS, "seeds=1"]
    assert here(*words).code == 0
    run = run_of(tmp_path / "runs" / "digits-mlp")
    for name in ("metrics.jsonl", "effects.jsonl", ".lock", "checkpoint.pt"):
        (run / "summary.json").unlink(missing_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
        ended = here(*words)
        assert ended.code == 1
        assert f"{name} is a link to a place outside of the study" in ended.err
        assert target.read_text(encoding="utf-8") == SECRET
        (run / name).unlink()
