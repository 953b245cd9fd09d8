"""`tune=` on the command line: the budget, the choice, the page, and what is not done twice."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gradsurg.experiment import job
from gradsurg.experiment.run_reader import read
from gradsurg.report.experiment import commands
from gradsurg.report.study import read_study
from gradsurg.report.tuning import read_tunings
from tests.conftest import Here

SHORT = ("steps=8", "seeds=1", "logger=none", "tune_seeds=2", "report=false")
TUNE = "tune=lr=log(0.01,1,3)"


def rate(path: Path) -> float:
    return (read(path / "config.yaml") or {})["optimizer"]["lr"]


def summaries(folder: Path) -> dict[Path, dict[str, Any]]:
    return {
        path.parent: json.loads(path.read_text("utf-8")) for path in folder.rglob("summary.json")
    }


def test_each_arm_is_compared_at_the_value_that_it_chose(here: Here, folder: Path) -> None:
    ended = here("transform=clip", *SHORT, TUNE)
    assert ended.code == 0
    assert (
        "tuning: 3 configurations x 2 seeds x 2 arms = 12 runs (seeds 1000000 to 1000001), then 2 "
        "with the chosen values (seed 0)"
    ) in ended.err
    runs = summaries(folder)
    assert len(runs) == 14
    for label, arm in (("clip", "clip"), ("none", "control")):
        scores: dict[float, list[float]] = {}
        for path, summary in runs.items():
            lr = rate(path)
            if path.parent.name == "tuning" and summary["label"] == label:
                scores.setdefault(lr, []).append(summary["validation/accuracy"])
        best = max(scores, key=lambda lr: fmean(scores[lr]))
        (final,) = (folder / "runs" / "digits-mlp").glob(f"{label}-seed0-*")
        assert rate(final) == best
        assert f"  {arm}: lr={best:g} (validation accuracy {fmean(scores[best]):.2%}; " in ended.out
    lines = commands(read_study(folder / "runs" / "digits-mlp").all_runs)
    assert [line.partition(" 'tune=")[0] for line in lines] == [
        f"python -m gradsurg.run transform=clip {' '.join(SHORT)}"
    ]
    again = here("transform=clip", *SHORT, TUNE)
    assert again.code == 0
    assert "2 of them had been finished before" in again.out
    assert summaries(folder) == runs


@pytest.mark.slow
def test_an_interrupted_tuning_goes_on_where_it_was(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    execute, calls = job.execute, []

    def third_interrupts(*args: object) -> object:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "execute", third_interrupts)
    assert here("transform=clip", *SHORT, TUNE).code == 130
    first = {path: (path / "summary.json").stat().st_mtime_ns for path in summaries(folder)}
    assert len(first) == 3
    monkeypatch.setattr(job, "execute", execute)
    assert here("transform=clip", *SHORT, TUNE).code == 0
    assert len(summaries(folder)) == 14
    assert {path: (path / "summary.json").stat().st_mtime_ns for path in first} == first


@pytest.mark.slow
def test_a_sweep_tunes_a_shared_control_once(here: Here, folder: Path) -> None:
    words = ("-m", "transform=clip,sign", *SHORT, "tune=lr=[0.1,1]")
    ended = here(*words)
    assert ended.code == 0, ended.err
    assert "tuning in each job: 2 configurations x 2 seeds x 2 arms = 8 runs" in ended.err
    assert "12 to train" in ended.err
    assert len(summaries(folder)) == 12 + 3
    assert ended.out.count("(validation accuracy ") == 3
    tunings, faults = read_tunings(folder / "runs" / "digits-mlp")
    assert sorted(one.name for one in tunings) == ["clip", "control", "sign"]
    assert not faults
    again = here(*words)
    assert "15 finished before, skipped" in again.err
    assert len(summaries(folder)) == 15


@pytest.mark.slow
def test_a_tuning_with_a_failed_run_chooses_nothing(here: Here, folder: Path) -> None:
    ended = here("transform=their_module.total", *SHORT, "seed=0", TUNE)
    assert ended.code == 1
    assert "6 of 12 tuning runs failed: nothing is chosen" in ended.err
    assert not [*(folder / "runs" / "digits-mlp").glob("*-seed0-*")]
