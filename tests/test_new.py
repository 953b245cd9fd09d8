"""`scripts/new.py` writes files that pass their checks, and refuses names without writing."""

import ast
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from types import ModuleType

import pytest
import yaml

from gradsurg.testing import check_aggregator, check_transform
from scripts import new
from tests.naming import functions_that_name

HIDDEN = ignore_patterns("__pycache__", ".*", "experiments", "runs", "pages", "_build", "notebooks")
CHECKS = {"transform": check_transform, "aggregator": check_aggregator}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copytree(new.ROOT, tmp_path / "copy", ignore=HIDDEN)


def test_a_name_that_cannot_be_used_is_refused_in_one_line_and_nothing_is_written(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    names = ("clip", "noise", "base", "surgery", "lambda", "SoftClip", "../soft", "a" * 41)
    unlike = [("soft_clip", "--like", other) for other in ("autoclip", "base", "none", "no_such")]
    for words in (*((name,) for name in names), *unlike):
        assert new.main(["transform", *words], root) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def copyable(kind: new.Kind) -> list[str]:
    """The names of a kind of plug-in that have a class of their own."""
    configs = {path.stem for path in (new.ROOT / "conf" / new.GROUPS[kind.folder]).glob("*.yaml")}
    return sorted(name for name in configs if (new.ROOT / kind.files(name)[0]).exists())


@pytest.mark.parametrize("group", CHECKS)
def test_every_class_can_be_copied_with_its_config_and_a_row(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = new.KINDS[group]
    names = copyable(kind)
    assert len(names) > 25
    monkeypatch.setitem(sys.modules, "soft_clip", module := ModuleType("soft_clip"))
    for name in names:
        code, config, cases = (new.ROOT / path for path in kind.files(name))
        text = new.new_class(code.read_text("utf-8"), name, "soft_clip")
        assert text.count(new.TODO) == 2, name
        exec(text, vars(module))
        assert not {cls for cls in vars(module) if cls.lower() == name.replace("_", "")}, name
        fields = yaml.safe_load(new.new_yaml(config.read_text("utf-8"), name, "soft_clip"))
        assert fields.get("soft_clip", fields)["_target_"] == "gradsurg.SoftClip"
        before, after = cases.read_text("utf-8"), new.with_row(cases, name, "soft_clip")
        ast.parse(after)
        pattern = r'Row\(\s*"soft_clip"'
        assert len(re.findall(pattern, after)) == 1 + len(re.findall(pattern, before)), name
        vars(module).clear()


def test_a_transform_whose_first_row_is_not_on_its_own_lines_is_not_copied(tmp_path: Path) -> None:
    (path := tmp_path / "cases.py").write_text('ROWS = (\n    *rows("clip"),\n)\n', "utf-8")
    with pytest.raises(ValueError, match="'clip' cannot be copied: no line of cases.py begins a"):
        new.with_row(path, "clip", "soft_clip")


@pytest.mark.parametrize(
    ("group", "like"), [*((group, ()) for group in CHECKS), ("transform", ("--like", "momentum"))]
)
def test_the_class_has_its_properties_and_the_config_has_its_defaults(
    group: str, like: tuple[str, ...], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new.main([group, "soft_clip", *like], root) == 0
    code, config, _ = (root / path for path in new.KINDS[group].files("soft_clip"))
    monkeypatch.setitem(sys.modules, "soft_clip", module := ModuleType("soft_clip"))
    exec(code.read_text("utf-8"), vars(module))
    CHECKS[group](module.SoftClip())
    assert bool(like) == hasattr(module, "TransformState")
    fields = yaml.safe_load(config.read_text("utf-8"))
    fields = fields.get("soft_clip", fields)
    assert fields.pop("_target_") == "gradsurg.SoftClip"
    assert module.SoftClip(**fields) == module.SoftClip()


def test_the_tests_that_name_a_class_are_found() -> None:
    folder = new.ROOT / "tests" / "transforms"
    found = functions_that_name("AdaptiveClip", folder)
    assert found["test_autoclip_forgets_norms_before_its_window"] == folder / "test_oracles.py"
    assert not any("grokfast" in name for name in found)
    assert functions_that_name("Adaptive", folder) == {}


@pytest.mark.slow  # the quick tests run without ruff
def test_ruff_checks_all_files_that_git_has_as_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new, "ROOT", root)
    monkeypatch.setattr(new, "ran", partial(new.ran, cwd=root))
    new.ran(["git", "init", "-q"])
    new.ran(["git", "add", "-A"])
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    new.ran(["git", *author, "commit", "-q", "--no-gpg-sign", "-m", "all"])
    assert new.style(new.TRANSFORM, "clip").count(",") == 1
    for path, text in (
        ("docs/draw_gallery.py", "import os\n"),
        ("tests/test_new_ones.py", "x=1\n"),
    ):
        before = (root / path).read_text("utf-8") if (root / path).exists() else ""
        (root / path).write_text(before + text, "utf-8")
        with pytest.raises(AssertionError, match=path if before else "format"):
            new.style(new.TRANSFORM, "clip")
        (root / path).write_text(before, "utf-8")


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
