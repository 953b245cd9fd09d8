"""A run whose aggregator finds no update says so in its summary, and trains on."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import NotConverged
from gradsurg.experiment.execution import execute
from gradsurg.experiment.run_directory import RunDirectory
from tests.experiment.test_kills import several


def test_skipped_updates_are_in_the_summary_and_the_conflicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(
        self: SolvedOnRows, rows: Tensor, order: Tensor, ridge: float, least: float
    ) -> Tensor:
        raise NotConverged("a test", 1.0)

    def tries(gramian: Tensor) -> bool:
        calls.append(1)
        return len(calls) <= 3

    calls: list[int] = []
    monkeypatch.setattr(gs.UPGrad, "weights_of_rows", fails)
    monkeypatch.setattr("gradsurg.aggregators.base.is_nearly_dependent", tries)
    surgery = gs.Surgery(gs.Intervention(gs.UPGrad(), gs.SharedParameters(), names=("upgrad",)))
    run = replace(several("random"), label="upgrad", identity={}, surgery=surgery)
    record = execute(run, tmp_path, [], threads=1)
    directory = RunDirectory(record.directory)
    notes = directory.read_summary()["notes"]
    assert isinstance(notes, list)
    assert [note for note in notes if "no solver converged" in note] == [
        "upgrad: 0 updates are less exact than others, as the gradients were nearly dependent, "
        "and 3 were skipped, as no solver converged"
    ]
    rows = directory.read_rows("conflicts.jsonl")
    assert rows[-1]["fallbacks"] == 3
