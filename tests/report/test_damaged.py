"""A damaged or hostile run is one line of the report; nothing outside of the study is touched."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsurg.report.__main__ import main
from gradsurg.report.load import read_study
from tests.report import studies

SECRET = "a line of somebody else"
BOMB = "a: &a [x, x, x]\n" + "".join(
    f"{after}: &{after} [*{before}, *{before}, *{before}]\n"
    for before, after in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)


def conflict_line(**more: object) -> str:
    return json.dumps(studies.conflict("clip", 0, **more)) + "\n"


DAMAGES = {
    "summary.json": [
        "",
        "null",
        "3",
        "[]",
        "{half",
        '{"state": "finished", "test/loss": "high"}',
        '{"state": "finished", "test/loss": 1e200}',
        '{"state": "finished", "until/reached": 1}',
        '{"state": "finished", "until": "test/loss <= 1"}',
        '{"state": "finished", "until": "test/loss <= 1", "until/reached": 1}',
    ],
    "run.json": [
        "null",
        '{"seed": "zero"}',
        '{"label": 3}',
        '{"controls": [1]}',
        '{"seed": 1e999}',
    ],
    "config.yaml": ["a: [", "3", "1: 2", "\0", BOMB, "[" * 60_000, "- " * 60_000, "a: !!x 3"],
    "metrics.jsonl": ["null\n", '{"step": "x"}\n', "[" * 60_000 + "\n", '{"step": 1e999}\n'],
    "effects.jsonl": ["3\n", '{"step": 1}\n', '{"a":' * 60_000 + "\n", "\0\n"],
    "conflicts.jsonl": [
        '{"step": 1, "aggregator": 3}\n',
        '{"step": [1]}\n',
        conflict_line(norms=[1.0]),
        conflict_line(norms=None),
        conflict_line(decrease=[]),
        conflict_line(cosines=[[1.0, 0.5], [0.5]]),
        conflict_line(cosines=[[1.0, 0.5]]),
        conflict_line(tasks=None),
    ],
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
    ("name", "content"),
    [
        pytest.param(name, text, marks=[pytest.mark.full] if number > 2 else [])
        for name, texts in DAMAGES.items()
        for number, text in enumerate(texts)
    ],
)
def test_a_broken_file_is_one_line_and_the_others_are_compared(
    study: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (run_of(study) / name).write_text(content, encoding="utf-8")
    assert main([str(study)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{name} " in text
    assert "-10.00 pp" in text  # of the other seed
    assert name in (study / "report" / "index.html").read_text(encoding="utf-8")


def test_a_row_of_twenty_thousand_numbers_is_not_drawn(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"step": 10, **{f"train/{k}": 0.5 for k in range(20_000)}}
    for name in ("metrics.jsonl", "effects.jsonl"):
        (run_of(study) / name).write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert main([str(study)]) == 0
    assert "metrics.jsonl has a line with more than 2000 keys" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "effects.jsonl"])
def test_a_file_larger_than_any_log_is_one_line(
    study: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = run_of(study) / name
    file.touch()
    os.truncate(file, 1 << 40)  # which takes no room on the disk
    assert main([str(study)]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert f"{name} has 1099511627776 bytes, more than 4294967296".replace(" ", "") in text


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
    assert main([str(study)]) == 0
    (broken,) = [run for run in read_study(study) if run.state == "unreadable"]
    assert broken.reason == f"{name} is a link to a place outside of the study"
    written = [path.read_bytes() for path in (study / "report").iterdir()]
    assert not any(SECRET.encode() in content for content in written)
    assert private(study) == before


def test_a_run_that_is_a_link_to_a_folder_elsewhere_is_refused(study: Path) -> None:
    (study / "clip-seed5-12345678").symlink_to(study.parent / "private")
    assert main([str(study)]) == 0
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


def test_control_characters_reach_no_terminal(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(study)
    for name in ("run.json", "summary.json"):
        content = json.loads((run / name).read_text(encoding="utf-8"))
        content["label"] = "\x1b[2J\x1b]0;title\x07cl\nip"
        (run / name).write_text(json.dumps(content), encoding="utf-8")
    failed = studies.plan(study, "noise", 0)
    failed.write_error("Traceback:\n  x\nValueError: \x1b[31mred\n")
    (study / "noise-seed1-\x1b[31m").mkdir()
    (study / "noise-seed1-\x1b[31m" / "config.yaml").touch()
    assert main([str(study)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"\x1b[2J" in text
    assert r"\x1b[31mred" in text


def test_names_are_no_markup_in_markdown_and_on_the_page(study: Path) -> None:
    file = run_of(study) / "run.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    label = "[x](https://evil.example) <script>alert(1)</script> | `a` www.evil.example"
    file.write_text(json.dumps({**facts, "label": label}), encoding="utf-8")
    assert main([str(study)]) == 0
    text = (study / "report" / "outcome.md").read_text(encoding="utf-8")
    assert r"\[x\](https:\//evil.example) \<script\>alert(1)\</script\> \| \`a\` www\." in text
    assert "<script>alert" not in (study / "report" / "index.html").read_text(encoding="utf-8")


def test_the_draft_of_a_killed_report_is_removed_by_the_next_one(study: Path) -> None:
    kill = (
        "import os, sys; from gradsurg.report import __main__, export;"
        "export.page = lambda *_: os._exit(9); __main__.main(sys.argv[1:])"
    )
    ended = subprocess.run([sys.executable, "-c", kill, str(study)], capture_output=True)
    assert ended.returncode == 9
    assert list((study / "report").glob(".draft-*"))
    assert main([str(study)]) == 0
    assert not list((study / "report").glob(".draft-*"))


def test_the_draft_of_a_report_that_is_being_written_stays(study: Path) -> None:
    assert main([str(study)]) == 0
    draft = study / "report" / f".draft-{os.uname().nodename}-{os.getpid()}-abc"
    draft.mkdir()
    assert main([str(study)]) == 0
    assert draft.is_dir()


FULL = """
import resource, signal, sys
from gradsurg.report.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main([sys.argv[1]]))
"""


@pytest.mark.parametrize("limit", [0, 3000, 200_000])
def test_a_full_disk_is_one_line_and_the_old_report_stays(study: Path, limit: int) -> None:
    assert main([str(study)]) == 0
    before = {path.name: path.read_bytes() for path in (study / "report").iterdir()}
    command = [sys.executable, "-c", FULL.format(limit=limit), str(study)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "test accuracy" in ended.stdout
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("the report cannot be written: ")
    assert {path.name: path.read_bytes() for path in (study / "report").iterdir()} == before


def test_a_study_that_cannot_be_written_to_is_reported_elsewhere(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study / "report").write_text("in the way", encoding="utf-8")  # root may write everywhere
    assert main([str(study)]) == 2
    assert capsys.readouterr().err.startswith("the report cannot be written: ")
    assert main([str(study), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "index.html").is_file()


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "config.yaml", "run.json"])
def test_a_folder_in_place_of_a_file_is_told(study: Path, file: str) -> None:
    path = run_of(study) / file
    path.unlink()
    path.mkdir()
    (broken,) = [run for run in read_study(study) if run.state == "unreadable"]
    assert broken.reason == f"{file} is not a file"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("summary.json", lambda text: text[: len(text) // 2]),
        ("summary.json", lambda text: "null"),
        ("metrics.jsonl", lambda text: text.replace("{", "[", 1)),
        ("effects.jsonl", lambda text: "{half\n" + text),
        ("run.json", lambda text: "3"),
        ("config.yaml", lambda text: "[" * 60_000),
    ],
)
def test_a_command_with_a_broken_run_finishes_the_others(
    here: Callable, tmp_path: Path, name: str, damage: Callable[[str], str]
) -> None:
    words = ["transform=clip", "steps=4", "seeds=2", "logger=none", "report=false", "out=runs"]
    assert here(*words).code == 0
    study = tmp_path / "runs" / "digits-mlp"
    file = run_of(study) / name
    file.write_text(damage(file.read_text(encoding="utf-8")), encoding="utf-8")
    (run_of(study, seed=1) / "summary.json").unlink()
    ended = here(*words)
    assert ended.code in (0, 1)
    assert "Traceback" not in ended.err
    assert (run_of(study, seed=1) / "summary.json").is_file()
    assert name in ended.err + ended.out or (name, ended.code) == ("run.json", 0)


@pytest.mark.parametrize("name", ["metrics.jsonl", "effects.jsonl", ".lock", "checkpoint.pt"])
def test_a_command_writes_through_no_link_out_of_the_study(
    here: Callable, tmp_path: Path, name: str
) -> None:
    words = ["transform=clip", "steps=4", "seeds=1", "logger=none", "report=false", "out=runs"]
    assert here(*words).code == 0
    run, target = run_of(tmp_path / "runs" / "digits-mlp"), tmp_path / "private"
    target.write_text(SECRET, encoding="utf-8")
    (run / "summary.json").unlink()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    ended = here(*words)
    assert ended.code == 1
    assert f"{name} is a link to a place outside of the study" in ended.err
    assert target.read_text(encoding="utf-8") == SECRET
