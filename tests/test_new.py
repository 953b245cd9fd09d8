"""`scripts/new.py` writes files that pass their checks, and refuses names without writing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from types import ModuleType

import pytest
import yaml

from gradsurg.testing import check_aggregator, check_transform
from scripts import new

HIDDEN = ignore_patterns("__pycache__", ".*", "experiments", "runs", "pages", "_build", "notebooks")
CHECKS = {"transform": check_transform, "aggregator": check_aggregator}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copytree(new.ROOT, tmp_path / "copy", ignore=HIDDEN)


def test_a_name_that_cannot_be_used_is_refused_in_one_line_and_nothing_is_written(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for name in ("clip", "noise", "base", "surgery", "lambda", "SoftClip", "../soft", "a" * 41):
        assert new.main(["transform", name], root) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("group", CHECKS)
def test_the_class_has_its_properties_and_the_config_has_its_defaults(
    group: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new.main([group, "soft_clip"], root) == 0
    code, config, _ = (root / path for path in new.KINDS[group].files("soft_clip"))
    monkeypatch.setitem(sys.modules, "soft_clip", module := ModuleType("soft_clip"))
    exec(code.read_text("utf-8"), vars(module))
    CHECKS[group](module.SoftClip())
    fields = yaml.safe_load(config.read_text("utf-8"))
    fields = fields.get("soft_clip", fields)
    assert fields.pop("_target_") == "gradsurg.SoftClip"
    assert module.SoftClip(**fields) == module.SoftClip()


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "scripts/new.py", *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_check_passes_for_new_files_and_fails_for_a_wrong_result(root: Path) -> None:
    code = root / "gradsurg/transforms/soft_clip.py"
    assert run(root, "transform", "soft_clip").returncode == 0
    assert "FAIL ruff" in run(root, "--check", "soft_clip").stdout
    for path in (code, root / "conf/transform/soft_clip.yaml"):
        assert new.TODO in path.read_text("utf-8")
        path.write_text(path.read_text("utf-8").replace(new.TODO, "Clip it"), "utf-8")
    assert run(root, "--check", "soft_clip").returncode == 0
    code.write_text(code.read_text("utf-8").replace("return grad", "return grad / 2"), "utf-8")
    assert (done := run(root, "--check", "soft_clip")).returncode == 1
    assert re.search(r"FAIL tests(.|\n)*Mismatched elements", done.stdout)


@pytest.mark.full
def test_the_check_fails_for_a_wrong_second_row_of_an_aggregator(root: Path) -> None:
    cases = root / "tests/aggregators/cases.py"
    second = 'Row("and_mask", [[1.0, 3.0], [1.0, 3.0], [4.0, -3.0]], [2.0, '
    text = cases.read_text("utf-8")
    assert second in text
    cases.write_text(text.replace(second, second.replace("[2.0, ", "[2.5, ")), "utf-8")
    assert (done := run(root, "--check", "and_mask")).returncode == 1
    assert re.search(r"FAIL tests(.|\n)*Mismatched elements", done.stdout)
