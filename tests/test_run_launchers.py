"""Sweeps whose jobs run in processes of their own, and equal commands that divide the runs."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from gradsurg.experiment.command import Command
from gradsurg.experiment.launchers import LAUNCHERS, interrupt_at_time_limit
from gradsurg.experiment.run_directory import ERROR, LOCK, METRICS, SUMMARY
from gradsurg.experiment.sweep import Sweep
from tests.runs import assert_same_studies

ROOT = Path(__file__).parents[1]
THEIRS = '''
import os
import signal
import time
from pathlib import Path

import torch

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless


class Acts(Stateless):
    """Changes nothing, and acts in a step of the training; the trial step is step 0."""

    step = 1
    properties = frozenset()

    def apply(self, grad, context):
        if context.step == self.step:
            self.act()
        return grad


@validated
class Notes(Acts):
    def act(self):
        Path(f"noted-{os.getpid()}").write_text(str(torch.get_num_threads()))


@validated
class Fails(Acts):
    def act(self):
        raise RuntimeError("the disk is on fire")


@validated
class Meets(Acts):
    def act(self):
        Path(f"met-{os.getpid()}").touch()
        end = time.monotonic() + 60
        while len([*Path().glob("met-*")]) < 3:
            assert time.monotonic() < end, "the other commands do not train"
            time.sleep(0.05)


@validated
class Overdue(Acts):
    step = 30

    def act(self):
        if "SUBMITIT_EXECUTOR" in os.environ:
            os.kill(os.getpid(), signal.SIGUSR2)
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
    """The exit code of a command and its stderr."""
    _, said = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.full
def test_a_parallel_sweep_is_bit_identical_to_one_in_a_single_process_also_if_a_job_fails(
    folder: Path,
) -> None:
    words = ("transform=theirs.Fails,clip,[add_noise,theirs.Notes]", "seeds=2", "model.dropout=0.2")
    words += ("steps=100", "logger=none", "threads=3", "report=false")
    for launcher in ("basic", "joblib", "submitit_local"):
        where = folder / launcher
        code, said = ended(started(folder, *words, f"out={launcher}", f"hydra/launcher={launcher}"))
        assert code == 1, said
        assert "Traceback" not in said
        paths = where.glob(f"digits-mlp/*/{SUMMARY}")
        names = sorted(path.parent.name.rpartition("-")[0] for path in paths)
        labels = ("add_noise+notes", "clip", "none")
        assert names == [f"{label}-seed{seed}" for label in labels for seed in "01"]
        if launcher != "basic":
            assert_same_studies(where, folder / "basic")
        logs = [path.read_text(encoding="utf-8") for path in where.glob(f"digits-mlp/*/{ERROR}")]
        assert ["the disk is on fire" in log for log in logs] == [True, True]
        assert not [*where.rglob(LOCK)]
    notes = [path.read_text(encoding="utf-8") for path in folder.glob("noted-*")]
    assert notes == ["3"] * 3  # each in a process of its own


@pytest.mark.slow
def test_equal_commands_divide_the_runs_of_a_sweep_and_train_each_once(folder: Path) -> None:
    """In the first step three processes must be training, more than a job has runs."""
    words = ("transform=theirs.Meets,[clip,theirs.Meets]", "seeds=2", "control=none")
    words += ("steps=100", "log_every=50", "logger=console", "report=false")
    commands = [started(folder, *words) for _ in range(3)]
    results = [ended(command) for command in commands]
    assert [code for code, _ in results] == [0, 0, 0], results
    assert not any("the other commands do not train" in said for _, said in results)
    # A run that another command has trained has no line of its own.
    trained = [re.findall(r"treated (\S+): finished", said) for _, said in results]
    assert all(trained)
    assert sorted(chain(*trained)) == [
        f"{label}-seed{seed}" for label in ("clip+meets", "meets") for seed in "01"
    ]
    for path in folder.glob(f"runs/digits-mlp/*/{METRICS}"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == [50, 100]
    assert not [*folder.rglob(LOCK)]


@pytest.mark.full
def test_the_time_limit_of_a_submitit_job_interrupts_its_run(folder: Path) -> None:
    words = ("transform=theirs.Overdue", "control=none", "steps=40", "logger=none", "report=false")
    words += ("log_every=10", "checkpoint_every=10", "checkpoint_seconds=0", "seeds=1")
    limit = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5")
    code, said = ended(started(folder, *words, *limit, "+hydra.launcher.max_num_timeout=0"))
    assert code == 1, said
    assert not [*folder.rglob(ERROR)]
    code, said = ended(started(folder, *words))
    assert code == 0, said
    assert "overdue, seed 0: was interrupted, resumed from its checkpoint" in said


def test_a_signal_handler_of_submitit_that_raises_interrupts_and_one_that_exits_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    before = signal.getsignal(signal.SIGUSR2)
    try:
        for error, expected in ((RuntimeError, KeyboardInterrupt), (SystemExit, SystemExit)):

            def handler(*_: object, error: type[BaseException] = error) -> None:
                raise error

            signal.signal(signal.SIGUSR2, handler)
            interrupt_at_time_limit()
            with pytest.raises(expected):
                signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
def test_a_missing_launcher_and_a_missing_sweeper_are_refused_with_the_way_out(
    folder: Path,
) -> None:
    # In one interpreter: what takes long is the start of each.
    words = [*(f"hydra/launcher={launcher}" for launcher in LAUNCHERS), "hydra/sweeper=optuna"]
    hidden = f"""
import sys
import hydra_plugins
hydra_plugins.__path__ = [{str(ROOT / "hydra_plugins")!r}]
from gradsurg import run
for word in {words}:
    sys.argv[1:] = ["-m", word, "transform=clip,sign"]
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
    assert done.stdout.split() == ["2"] * len(words), done.stderr
    assert done.stderr.splitlines() == [
        f"hydra/launcher: '{name}' is not installed: pip install 'gradsurg[{extra}]'"
        for name, extra in LAUNCHERS.items()
    ] + ["hydra/sweeper: 'optuna' is not installed: pip install 'gradsurg[sweepers]'"]
    assert not (folder / "runs").exists()


def test_a_launcher_sends_no_plan_to_its_jobs() -> None:
    sweep = Sweep()
    sweep._command = Command()
    sweep._command.experiments.append(threading.RLock())  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(sweep))._command is None


def test_the_listed_launchers_are_those_of_the_extra() -> None:
    Plugins.instance()
    there = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")}
    own = {name for name, extra in LAUNCHERS.items() if extra == "launchers"}
    assert there - {"ray", "ray_aws"} == {"basic", *own}


@pytest.mark.full
def test_a_job_that_slurm_pre_empts_is_requeued_and_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [ROOT / "tests" / "slurm_smoke.sh"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert_same_studies(tmp_path / "swept", tmp_path / "plain")
