"""gradsurg without its extras: what works, and the command that the rest asks for."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gradsurg.plugins.extras import how_to_install

ROOT = Path(__file__).parents[1]
SCRIPT, README = ROOT / "tests" / "base_install.py", ROOT / "README.md"
SENTENCE = how_to_install("polars", "run")
HIDDEN = "filelock numba polars altair vl_convert sklearn scipy jinja2"
WITHOUT = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in {HIDDEN.split()}
        return None if is_hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
"""Hides the packages of the extras `run` and `figures`, as if they were not installed."""

COMMANDS = ("gradsurg.run", "gradsurg.report", "gradsurg.reproduce", "gradsurg run")
ASK = f"""{WITHOUT}
import runpy
for words in {COMMANDS}:
    sys.argv = [*words.split(), "transform=clip"]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(end.code)
"""


def output(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in another folder, without the tests' own path unless it is this Python's."""
    own = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {"PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_the_extras_all_works_but_compare_and_load_study(tmp_path: Path) -> None:
    code = f"{WITHOUT}\nimport runpy\nsys.argv[:] = sys.argv[1:]\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = output([sys.executable, "-c", code, str(SCRIPT), str(README)], tmp_path)
    assert done.stdout.endswith("ok\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"; {how_to_install('numba', 'run')}\n")


def test_without_the_extras_a_command_asks_for_them_in_one_line(tmp_path: Path) -> None:
    done = output([sys.executable, "-c", ASK], tmp_path)
    assert done.stdout.split() == ["2"] * len(COMMANDS)
    assert done.stderr.splitlines() == [SENTENCE] * len(COMMANDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_base_alone_installs_and_has_all_that_ones_own_loop_needs(tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    output([*pip, "-c", constraints, "-e", str(ROOT)], tmp_path)
    assert output([python, str(SCRIPT), str(README)], tmp_path).stdout.endswith("ok\n")
    asked = subprocess.run(
        [python, "-m", "gradsurg.run", "transform=clip"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.returncode, asked.stderr) == (2, f"{SENTENCE}\n")
    (command,) = re.findall(r"pip install '([^']+)'", asked.stderr)
    plan = output([*pip, "--dry-run", "--report", "-", "-c", constraints, command], tmp_path)
    new = {one["metadata"]["name"] for one in json.loads(plan.stdout)["install"]}
    assert {"polars", "altair", "scipy", "scikit-learn", "numba"} <= new
