"""Studies that an earlier commit has written are reported on and, with the same torch, resumed.

`tests/old_runs` has three studies written with torch 2.13 by a commit of version 0.2.0 that had the
config key `update_effect_every`. `plain` and `sweep` are finished. The treated run of `killed` was
killed at step 23 and has a checkpoint of step 16. `expected.json` has the numbers of that version's
reports, and under `whole` the numbers of the killed run when nothing kills it. The commands were

    python -m gradsurg.run transform=clip seeds=6 study=plain WORDS
    python -m gradsurg.run -m transform=clip,sign lr=0.1,0.4 seeds=2 study=sweep WORDS
    python -m gradsurg.run study=killed KILLED WORDS

The files are never written anew: a version that cannot read them says so in its CHANGELOG.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsurg.report.compare import compare
from gradsurg.report.study import read_study
from tests.conftest import Here

FOLDER = Path(__file__).with_name("old_runs")
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
TORCH = "2.13"  # part of a run's identity

WORDS = ["steps=24", "log_every=4", "logger=none", "report=false", "model.hidden=[8]", "threads=1"]
WORDS += ["optimizer.lr=0.1"]  # which was the default
KILLED = ["transform=[grokfast_ema,noise]", "seeds=1", "model.dropout=0.3"]
KILLED += ["checkpoint_every=8", "checkpoint_seconds=0"]


@pytest.fixture
def copied(folder: Path) -> Path:
    """A copy in the current folder, named `runs`."""
    shutil.copytree(FOLDER, folder / "runs")
    return folder / "runs"


@pytest.mark.parametrize("name", ["plain", "sweep"])
def test_the_report_has_the_numbers_that_it_had(name: str) -> None:
    study = read_study(FOLDER / name)
    assert study.faults == []
    found = {f"{row['arm']} | {row['metric']}": row for row in compare(study).to_dicts()}
    assert found.keys() == EXPECTED[name].keys()
    for key, numbers in EXPECTED[name].items():
        assert {column: found[key][column] for column in numbers} == pytest.approx(
            numbers, rel=1e-9
        )


def test_finished_runs_are_not_trained_again(here: Here, copied: Path) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*.json*")}
    ended = here("transform=clip", "seeds=6", "study=plain", *WORDS)
    assert ended.code == 0
    if torch.__version__.startswith(TORCH):
        assert "12 of them had been finished before" in ended.out
        assert before == {path: path.read_bytes() for path in copied.rglob("*.json*")}
    else:
        assert "had been finished before" not in ended.out


def test_a_killed_run_is_resumed_and_ends_as_one_that_nothing_kills(
    here: Here, copied: Path
) -> None:
    ended = here(*KILLED, "study=killed", *WORDS)
    assert ended.code == 0
    runs = list((copied / "killed").glob("grokfast_ema+noise-*"))
    if torch.__version__.startswith(TORCH):
        assert "grokfast_ema+noise, seed 0: was interrupted, resumed from its checkpoint" in (
            ended.err
        )
        (run,) = runs
    else:
        assert "resumed" not in ended.err
        (run,) = (one for one in runs if not (FOLDER / "killed" / one.name).is_dir())
    assert _numbers(run / "metrics.jsonl") == [
        pytest.approx(row, rel=1e-5) for row in EXPECTED["whole"]["metrics"]
    ]
    (summary,) = _numbers(run / "summary.json")
    whole = EXPECTED["whole"]["summary"]
    compared = {key: value for key, value in whole.items() if isinstance(value, float)}
    assert {key: summary[key] for key in compared} == pytest.approx(compared, rel=1e-5)


def _numbers(file: Path) -> list[dict[str, Any]]:  # Any: what JSON can hold
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    return [json.loads(line) for line in lines]
