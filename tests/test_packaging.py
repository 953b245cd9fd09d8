"""A wheel holds all that the command needs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from runpy import run_path
from shutil import copy, copytree, ignore_patterns, rmtree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WORDS = ["transform=clip", "steps=20", "seeds=1", "logger=none"]
WHENCE = """
import gradsurg
from gradsurg.experiment import compose
print(gradsurg.__file__, compose.CONFIG_DIR, gradsurg.__version__, sep="\\n")
"""


def python(folder: Path, *words: str, path: str = "") -> str:
    """Return the output of Python in a folder; `path` precedes the editable install."""
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folders_that_are_tested_with_the_lowest_dependencies_exist() -> None:
    tested = run_path(str(ROOT / "scripts/lower_bounds.py"))["TESTS"]
    assert [name for name in tested if not (ROOT / "tests" / name).is_dir()] == []


def test_the_constraints_pin_each_dependency_within_its_bounds_and_are_in_the_archive() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = text["project"]["optional-dependencies"]
    groups = ("figures", "tensorboard", "launchers", "test", "docs", "dev", "trainers")
    listed = text["project"]["dependencies"] + [one for name in groups for one in extras[name]]
    needed = [one for one in map(Requirement, listed) if one.name != "gradsurg"]
    assert len(needed) > 30
    for one in needed:
        assert one.specifier.contains(pinned[canonicalize_name(one.name)]), one
    sdist = text["tool"]["hatch"]["build"]["targets"]["sdist"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r" -c (\S+) ", readme)) == {"constraints.txt"} <= {*sdist["include"]}


@pytest.mark.full
def test_a_wheel_has_every_module_and_config_and_runs_the_command(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    for name in ("gradsurg", "conf", "hydra_plugins"):
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    python(tmp_path, *pip, "wheel", "--no-deps", str(source))
    (wheel,) = tmp_path.glob("*.whl")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{wheel.name}`" in readme
    python(tmp_path, *pip, "install", "--no-deps", "--target", str(installed), str(wheel))
    rmtree(source)
    (metadata,) = installed.glob("gradsurg-*.dist-info/METADATA")
    assert "\nProject-URL: Repository, https://" in metadata.read_text(encoding="utf-8")
    assert readme in metadata.read_text(encoding="utf-8")
    package = installed / "gradsurg"
    for folder, there in (
        (ROOT / "gradsurg", package),
        (ROOT / "conf", package / "conf"),
        (ROOT / "hydra_plugins", installed / "hydra_plugins"),
    ):
        paths = [*folder.rglob("*.py"), *folder.rglob("*.yaml")]
        expected = {path.relative_to(folder) for path in paths}
        assert expected
        assert expected - {path.relative_to(there) for path in there.rglob("*")} == set()
    assert (package / "py.typed").is_file()
    assert (installed / "bin" / "gradsurg").is_file()
    assert not (installed / "tests").exists()
    home, conf, version = python(tmp_path, "-c", WHENCE, path=str(installed)).splitlines()
    assert (home, conf) == (str(package / "__init__.py"), str(package / "conf"))
    assert version != "0+unknown"
    printed = python(tmp_path, "-m", "gradsurg.run", *WORDS, path=str(installed))
    assert printed.startswith("Test accuracy of clip minus control: ")
    assert (tmp_path / "runs" / "digits-mlp" / "report" / "index.html").is_file()
