"""A search by a sweeper that chooses the values of each trial by the results of earlier ones."""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from gradsurg.report.load import NotAStudy
from gradsurg.report.study import read_study

ROOT = Path(__file__).parents[1]
SEARCH = (
    "-m hydra/sweeper=optuna hydra.sweeper.n_trials=4 hydra.sweeper.n_jobs=2 "
    "hydra.sweeper.sampler.seed=1 transform=clip logger=none steps=20 study=found seeds=2 "
    "validation=0.2 control=none"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("hydra_plugins.hydra_optuna_sweeper") is None, reason="needs gradsurg[sweepers]"
    ),
]


def ended(folder: Path, line: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gradsurg.run", *shlex.split(line)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_search_returns_its_metric_on_validation_data_and_its_trials_are_not_compared(
    tmp_path: Path, launcher: str
) -> None:
    line = f"{SEARCH} hydra/launcher={launcher} 'transform.clip.value=interval(0.001,0.1)'"
    done = ended(tmp_path, f"{line} 'lr=interval(0.01,1)'")
    assert done.returncode == 0, done.stderr
    study = tmp_path / "runs" / "found"
    values: dict[tuple[str, ...], list[float]] = {}
    for file in study.glob("*/run.json"):
        facts = json.loads(file.read_text(encoding="utf-8"))
        summary = json.loads(file.with_name("summary.json").read_text(encoding="utf-8"))
        assert facts["search"] == {"metric": "validation/accuracy", "lower": False}
        values.setdefault((*facts["command"],), []).append(summary["validation/accuracy"])
    assert [len(seeds) for seeds in values.values()] == [2] * 4
    found = yaml.safe_load((study / ".sweep/optimization_results.yaml").read_text(encoding="utf-8"))
    assert found["best_value"] == pytest.approx(max(sum(two) / 2 for two in values.values()))
    best, advice = done.stdout.splitlines()
    assert best.startswith("4 trials of clip: the best has validation accuracy ")
    with pytest.raises(NotAStudy, match="has only trials of a search"):
        read_study(study)
    command = advice.partition(" python -m gradsurg.run ")[2]
    assert "'seed=range(2,10)'" in command
    assert ended(tmp_path, command).returncode == 0
    compared = read_study(study)
    assert (len(compared.trials), len(compared.all_runs)) == (8, 16)
    assert {run.seed for run in compared.all_runs} == {*range(2, 10)}


def test_a_loss_is_minimised_and_a_diverged_trial_is_worse_than_all_others(tmp_path: Path) -> None:
    done = ended(tmp_path, f"{SEARCH} metric=test/loss 'optimizer.lr=choice(0.1,1e30)'")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "runs/found/.sweep/optimization_results.yaml"
    found = yaml.safe_load(place.read_text(encoding="utf-8"))
    assert found["best_params"] == {"optimizer.lr": 0.1}
    assert 0 < found["best_value"] < 10


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("task.test_fraction=7", "task.test_fraction: must be <= 0.9, found 7"),
        ("validation=0", "validation: a search chooses on validation data: give their share"),
        ("metric=train/loss", "metric: chooses by the metric of the verdict, on validation data"),
    ],
)
def test_a_wrong_search_ends_before_its_first_trial(tmp_path: Path, words: str, told: str) -> None:
    line = SEARCH.replace("validation=0.2 ", "" if "validation" in words else "validation=0.2 ")
    done = ended(tmp_path, f"{line} {words} 'lr=interval(0.01,1)'")
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_search_prints_one_plan_and_leaves_no_file(tmp_path: Path) -> None:
    done = ended(tmp_path, f"{SEARCH} 'lr=interval(0.01,1)' dry_run=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("clip: Clip(value=0.01) at Parameters(") == 1
    assert [*tmp_path.iterdir()] == []
