"""The wheel: it holds the configs, and the command runs from it without the checkout."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_sinks import alone

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip(place, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT))
    (path,) = place.glob("gradsurg-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel in a folder of its own."""
    place = tmp_path_factory.mktemp("installed")
    pip(place, "install", "--no-deps", "--no-index", "--target", str(place / "site"), str(wheel))
    return place / "site"


def pip(place: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        cwd=place,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )


def run(installed: Path, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=alone(folder) | {"PYTHONPATH": str(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_every_module_every_config_and_nothing_else(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "gradsurg"
    modules = {f"gradsurg/{path.relative_to(package)}" for path in package.rglob("*.py")}
    conf = ROOT / "conf"
    configs = {f"gradsurg/conf/{path.relative_to(conf)}" for path in conf.rglob("*.yaml")}
    assert len(configs) > 20
    assert held == modules | configs | {"gradsurg/py.typed"}


@pytest.mark.slow
def test_an_installed_wheel_runs_without_the_checkout(installed, tmp_path) -> None:
    code = "import gradsurg, gradsurg.compose as c; print(gradsurg.__file__, c.CONFIG_DIR)"
    package, conf = run(installed, tmp_path, "-c", code).split()
    assert Path(package) == installed / "gradsurg" / "__init__.py"
    assert Path(conf) == installed / "gradsurg" / "conf"
    words = ("transform=[clip,noise]", "steps=20", "seeds=1", "sink=none")
    printed = run(installed, tmp_path, "-m", "gradsurg.run", *words)
    assert printed.startswith("clip+noise: test accuracy ")
    assert len(list(tmp_path.glob("runs/default/clip+noise-seed0-*/summary.json"))) == 1
    assert re.search(
        r"^transform: .*\bclip\b", run(installed, tmp_path, "-m", "gradsurg.run", "--help"), re.M
    )


def test_a_checkout_takes_the_configs_beside_the_package() -> None:
    from gradsurg.compose import CONFIG_DIR

    assert CONFIG_DIR == ROOT / "conf"
    assert (CONFIG_DIR / "config.yaml").is_file()
