"""A run whose aggregator finds no update says so in its summary, and trains on."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.solvers import NotConverged
from gradsurg.experiment.execution import execute
from tests.experiment.test_kills import several
from tests.runs import lines, notes


def test_skipped_updates_are_in_the_summary_and_the_conflicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Tensor:
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
    assert [note for note in notes(record) if "no solver converged" in note] == [
        "upgrad: 0 updates are less exact, because the gradients were nearly dependent, "
        "and 3 were skipped, as no solver converged"
    ]
    assert lines(record, "conflicts.jsonl")[-1]["fallbacks"] == 3
