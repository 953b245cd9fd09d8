"""A wheel holds all that the command needs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from runpy import run_path
from shutil import copy, copytree, ignore_patterns, rmtree, unpack_archive

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

APP = """
import hydra
from hydra.utils import instantiate


@hydra.main(config_path=None, version_base="1.3")
def main(config):
    import gradsurg

    print(gradsurg.__file__, instantiate(config.transform.clip), sep="\\n")
    print(gradsurg.from_config(config.surgery) == gradsurg.load("grokfast"))


main()
"""
"""A Hydra app that knows gradsurg by its search path alone."""
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def python(folder: Path, *words: str, path: str = "") -> str:
    """Return the output of Python in a folder; `path` precedes the editable install."""
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_app(folder: Path, package: Path, path: str) -> None:
    """Check that an app gets its configs of `package`, which is on `path`, without a warning."""
    (folder / "app.py").write_text(APP, encoding="utf-8")
    words = ["hydra.searchpath=[pkg://gradsurg.conf]", "+transform=clip", "+surgery=grokfast"]
    words += ["hydra.run.dir=.", "hydra.output_subdir=null"]
    printed = python(folder, "-W", "error::UserWarning", "app.py", *words, path=path)
    assert printed.splitlines() == [str(package / "__init__.py"), "Clip(value=0.01)", "True"]


def copied(folder: Path) -> Path:
    """Copy to a folder what a wheel is built of."""
    for name in ("gradsurg", "conf", "hydra_plugins"):
        copytree(ROOT / name, folder / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, folder)
    return folder


def test_an_app_gets_its_configs_of_a_checkout_which_needs_no_links(tmp_path: Path) -> None:
    files = [path for name in ("gradsurg", "conf") for path in (ROOT / name).rglob("*")]
    assert files
    assert not any(path.is_symlink() for path in files)  # a clone on Windows has none
    check_app(tmp_path, ROOT / "gradsurg", str(ROOT))


@pytest.mark.full
def test_an_app_gets_its_configs_of_a_source_archive(tmp_path: Path) -> None:
    source, tools = copied(tmp_path / "source"), tmp_path / "tools"
    python(tmp_path, *PIP, "install", "--target", str(tools), "hatchling")
    python(source, "-m", "hatchling", "build", "-t", "sdist", "-d", "..", path=str(tools))
    rmtree(source)
    (archive,) = tmp_path.glob("*.tar.gz")
    unpack_archive(archive, tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("gradsurg-*/")
    check_app(tmp_path, unpacked / "gradsurg", str(unpacked))


@pytest.mark.full
def test_an_app_gets_its_configs_of_an_editable_install(tmp_path: Path) -> None:
    source, site = copied(tmp_path / "source"), tmp_path / "site"
    python(tmp_path, *PIP, "install", "--no-deps", "--target", str(site), "-e", str(source))
    (added,) = site.glob("*.pth")  # Python reads it in its own folder alone
    path = os.pathsep.join([str(site), *added.read_text(encoding="utf-8").split()])
    check_app(tmp_path, source / "gradsurg", path)


def test_the_folders_that_are_tested_with_the_lowest_dependencies_exist() -> None:
    tested = run_path(str(ROOT / "scripts/lower_bounds.py"))["TESTS"].split()
    assert [name for name in tested if not (ROOT / "tests" / name).is_dir()] == []


def test_the_constraints_pin_each_dependency_within_its_bounds_and_are_in_the_archive() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = text["project"]["optional-dependencies"]
    groups = ("run", "figures", "tensorboard", "launchers", "test", "docs", "dev", "trainers")
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
    source, installed = copied(tmp_path / "source"), tmp_path / "installed"
    python(tmp_path, *PIP, "wheel", "--no-deps", str(source))
    (wheel,) = tmp_path.glob("*.whl")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    python(tmp_path, *PIP, "install", "--no-deps", "--target", str(installed), str(wheel))
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
    check_app(tmp_path, package, str(installed))
    printed = python(tmp_path, "-m", "gradsurg.run", *WORDS, path=str(installed))
    assert printed.startswith("Test accuracy of clip minus control at lr ")
    assert (tmp_path / "runs" / "digits-mlp" / "report" / "index.html").is_file()
