"""Sweeps whose jobs run in processes of their own, and sweeps that meet at the same runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from gradsurg.experiment.run_directory import LOCK, SUMMARY
from scripts.same_runs import differences

ROOT = Path(__file__).parents[1]
SHORT = ("steps=20", "seeds=1", "logger=none")
LAUNCHERS = ("joblib", "submitit_local", "submitit_slurm")
SWEEP = ("transform=theirs.fails,clip,[add_noise,theirs.Noted]", "seeds=2", "model.dropout=0.2")
SWEEP += ("steps=100", "checkpoint_every=20", "log_every=10", "logger=none")

THEIRS = '''
import os
import sys
from pathlib import Path

import torch

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless


@validated
class Noted(Stateless):
    """Changes nothing, and writes down where it was at work and with how many threads."""

    @property
    def properties(self):
        return frozenset()

    def apply(self, grad, context):
        if context.step == 0 and is_training():
            Path(f"noted-{os.getpid()}").write_text(str(torch.get_num_threads()))
        return grad


def is_training():  # and not in the step that is tried before
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "_train":
        frame = frame.f_back
    return frame is not None


def fails(grad):
    if not is_training():
        return grad
    raise RuntimeError("the disk is on fire")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with transforms of a user's own."""
    (tmp_path / "theirs.py").write_text(THEIRS, encoding="utf-8")
    return tmp_path


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "gradsurg.run", "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit code of a command and what it said on stderr."""
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def finished(folder: Path, study: str = "digits-mlp") -> list[str]:
    """The finished runs of a study, without their hashes."""
    paths = (folder / "runs" / study).glob(f"*/{SUMMARY}")
    return sorted(path.parent.name.rpartition("-")[0] for path in paths)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep `SWEEP` in a single process; one of its jobs fails."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "theirs.py").write_text(THEIRS, encoding="utf-8")
    code, said = ended(started(folder, *SWEEP))
    assert code == 1, said
    return folder


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_parallel_sweep_is_bit_identical_to_one_in_a_single_process_also_if_a_job_fails(
    folder: Path, alone: Path, launcher: str
) -> None:
    code, said = ended(started(folder, *SWEEP, "threads=3", f"hydra/launcher={launcher}"))
    assert code == 1, said
    assert "Traceback" not in said
    names = [
        f"{label}-seed{seed}" for label in ("add_noise+noted", "clip", "none") for seed in "01"
    ]
    assert finished(folder) == names
    assert [*differences(alone / "runs", folder / "runs")] == []
    (note,) = folder.glob("noted-*")
    assert note.read_text(encoding="utf-8") == "3"
    logs = [log.read_text(encoding="utf-8") for log in folder.glob("runs/digits-mlp/*/error.log")]
    assert ["the disk is on fire" in log for log in logs] == [True, True]
    assert not [*folder.rglob(LOCK)]


@pytest.mark.slow
def test_two_simultaneous_sweeps_of_one_study_train_each_run_once(folder: Path) -> None:
    words = ("transform=clip,sign,[clip,add_noise]", "seeds=2", "steps=400", "logger=console")
    both = [started(folder, *words) for _ in range(2)]
    results = [ended(process) for process in both]
    assert [code for code, _ in results] == [0, 0], results
    labels = ("clip", "clip+add_noise", "none", "sign")
    names = sorted(f"{label}-seed{seed}" for label in labels for seed in "01")
    assert finished(folder) == names
    # A run that is taken up finished has no line of its own.
    lines = [line for _, said in results for line in said.splitlines()]
    trained = [re.match(r" *\d+/\d+ (treated|control) (\S+): finished", line) for line in lines]
    told = [f"{'none-' * (one[1] == 'control')}{one[2]}" for one in trained if one]
    assert sorted(told) == names
    for path in folder.glob("runs/digits-mlp/*/metrics.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]
        assert steps == [*range(50, 401, 50)]
    assert not [*folder.rglob(LOCK)]


@pytest.mark.slow
def test_a_missing_launcher_is_reported_with_the_command_that_installs_it(
    folder: Path,
) -> None:
    # In one interpreter: what takes long is the start of each.
    hidden = f"""
import sys
sys.modules["hydra_plugins"] = None
from gradsurg import run
for launcher in {LAUNCHERS}:
    sys.argv[1:] = ["-m", f"hydra/launcher={{launcher}}", "transform=clip", *{SHORT}]
    try:
        run.main()
    except SystemExit as ended:
        print(ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", hidden],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2"] * len(LAUNCHERS), done.stderr
    assert done.stderr.splitlines() == [
        f"hydra/launcher: '{launcher}' is not installed: pip install 'gradsurg[launchers]'"
        for launcher in LAUNCHERS
    ]
    assert not (folder / "runs").exists()


def test_the_listed_launchers_are_those_of_the_extra() -> None:
    Plugins.instance()
    there = ConfigStore.instance().list("hydra/launcher")
    assert sorted(there) == [f"{name}.yaml" for name in ("basic", *LAUNCHERS)]


@pytest.mark.full
def test_a_job_that_slurm_pre_empts_is_requeued_and_ends_as_if_nothing_had_happened() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "slurm_smoke.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "pre-empted, requeued and went on from step " in done.stdout
