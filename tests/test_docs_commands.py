"""The commands of docs/sweeps.md and docs/reproduce.md run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Here
from tests.runs import ROOT
from tests.test_docs import commands
from tests.test_readme import blocks

SWEEPS = commands("docs/sweeps.md")
SEARCHES = [line for line in SWEEPS if "hydra/sweeper" in line]
ONE_PROCESS = [line for line in SWEEPS if "launcher" not in line and line not in SEARCHES]
LAUNCHED = [line for line in SWEEPS if "launcher" in line and "launcher=ray" not in line]
SHORT = ("steps=2", "logger=none", "report=false")


@pytest.mark.slow
def test_the_commands_on_one_machine_share_their_runs(here: Here, folder: Path) -> None:
    (first,) = ONE_PROCESS
    ended = here(*shlex.split(first.replace("seeds=8", "seeds=2"))[3:], *SHORT)
    assert ended.code == 0, ended.err
    assert "12 runs: 12 to train" in ended.err  # 4 arms and 2 controls, and not 8 and 8
    ended = here(*shlex.split(first.replace("seeds=8", "seeds=3"))[3:], *SHORT)
    assert "18 runs: 12 finished before, skipped; 6 to train" in ended.err
    assert len(list(folder.glob("runs/grid/*/summary.json"))) == 18


@pytest.mark.full
@pytest.mark.parametrize("line", LAUNCHED, ids=["joblib", "slurm"])
def test_the_commands_with_a_launcher_run(folder: Path, line: str) -> None:
    words = [word for word in shlex.split(line)[3:] if "max_num_timeout" not in word]
    # submitit_local takes the place of a cluster, and has not that key.
    words = [word.replace("submitit_slurm", "submitit_local") for word in words]
    command = [sys.executable, "-m", "gradsurg.run", *words, *SHORT, "seeds=1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("runs/*/*/summary.json"))) == 3


@pytest.mark.full
def test_the_claim_of_ones_own_is_judged(tmp_path: Path) -> None:
    text = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
    for name in ("gradsurg", "conf", "hydra_plugins", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = re.findall(r"^`(experiments/\S+\.yaml)`", text, re.MULTILINE)
    assert len(files) == 2
    for file, content in zip(files, blocks("yaml", "docs/reproduce.md"), strict=True):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "scripts/reproduce.py", "graves2013"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graves2013, published: holds (2 of 2 bands hold)" in done.stdout
