"""A wheel holds all that the command needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("gradsurg", "conf", "pyproject.toml", "README.md", "LICENSE")
WORDS = ["transform=clip", "steps=20", "seeds=1", "logger=none"]


WHENCE = """
import gradsurg
from gradsurg.experiment import compose
print(gradsurg.__file__, compose.CONFIG_DIR, gradsurg.__version__, sep="\\n")
"""


def python(installed: Path, folder: Path, *words: str) -> str:
    """What Python prints in `folder` with nothing but the wheel on its path."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        # What is on the path stands before the editable install.
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*words: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    done = subprocess.run(
        [sys.executable, "-m", "pip", words[0], *quiet, *words[1:]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a wheel of a copy of the tree is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        part = ROOT / name
        if part.is_dir():
            shutil.copytree(part, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(part, source)
    pip("wheel", str(source), "--wheel-dir", str(folder))
    (wheel,) = folder.glob("*.whl")
    pip("install", "--target", str(folder / "installed"), str(wheel))
    shutil.rmtree(source)
    return folder / "installed"


@pytest.mark.slow
def test_the_command_runs_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    package, conf, version = python(installed, tmp_path, "-c", WHENCE).splitlines()
    assert package == str(installed / "gradsurg" / "__init__.py")
    assert conf == str(installed / "gradsurg" / "conf")
    assert version != "0+unknown"
    printed = python(installed, tmp_path, "-m", "gradsurg.run", *WORDS)
    assert printed.startswith("Test accuracy of clip minus control: ")
    assert len([*(tmp_path / "runs" / "digits-mlp").glob("*-seed0-*")]) == 2
    assert (tmp_path / "runs" / "digits-mlp" / "report" / "index.html").is_file()


@pytest.mark.slow
def test_a_wheel_has_every_module_and_every_config(installed: Path) -> None:
    package = installed / "gradsurg"
    for folder, there, kind in (
        (ROOT / "gradsurg", package, "*.py"),
        (ROOT / "conf", package / "conf", "*.yaml"),
    ):
        expected = {path.relative_to(folder) for path in folder.rglob(kind)}
        assert expected
        assert expected - {path.relative_to(there) for path in there.rglob(kind)} == set()
    assert (package / "py.typed").is_file()
    assert (installed / "bin" / "gradsurg").is_file()
    assert not (installed / "tests").exists()
