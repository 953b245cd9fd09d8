"""Counts of fired triggers in the ledger, the effects and their files."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import effect_table as effect_text
from gradsurg.experiment.frames import effect_table
from gradsurg.experiment.run_directory import RunDirectory
from tests.nets import attached


class Sums(nn.Module):
    """A model whose weight gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: float) -> Tensor:
        return (self.w * x).sum()


def _live(model: nn.Module, when: gs.Trigger, sizes: list[float]) -> gs.Live:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, gs.Scale(2.0), None, optimizer, when) as live:
        for size in sizes:
            optimizer.zero_grad()
            model(size).backward()
            optimizer.step()
    return live


@pytest.mark.parametrize("when", [gs.Threshold(2.0), gs.Every(3, offset=1)], ids=repr)
def test_ledger_and_effects_count_decisions_of_host_and_device(when: gs.Trigger) -> None:
    live = _live(Sums(), when, [1.0, 3.0, 1.0, 1.0, 4.0, 1.0, 1.0, 5.0])
    (entry,), (row,) = live.ledger, live.effects.rows()
    assert (entry.calls, entry.all_fired) == (8, 3)
    assert (row["seen"], row["calls"]) == (8, 3)
    assert live.ledger.table().splitlines()[2].split() == ["scale", "8", "3", "w"]
    head, _, line = live.effects.table().splitlines()
    assert head.split()[-2:] == ["fired", "calls"]
    assert line.split()[-2:] == ["37.5%", "3"]


def test_effects_of_a_gradient_that_the_device_does_not_select_are_those_of_no_change() -> None:
    (row,) = _live(Sums(), gs.Threshold(2.0), [1.0, 4.0]).effects.rows()
    # Half of the two was doubled: |g| is 1 and 4 before, 1 and 8 after.
    assert (row["norm_before"], row["norm_after"], row["changed"]) == (2.5, 4.5, 0.5)


@pytest.mark.parametrize("when", [gs.Always(), gs.Threshold(0.0), gs.Flag("a", on=True)], ids=repr)
def test_a_trigger_that_always_fires_has_no_column(when: gs.Trigger) -> None:
    assert "fired" not in _live(Sums(), when, [1.0, 2.0]).effects.table()


def test_a_site_where_the_trigger_never_fires_is_listed_with_the_others() -> None:
    model = nn.Sequential(Sums(), nn.Sequential(nn.Linear(1, 1)))
    with attached(model, gs.Scale(2.0), when=gs.Depth(high=1)) as live:
        (model[0](1.0) + model[1](torch.ones(1))).backward()
    rows = {row["site"]: (row["seen"], row["calls"]) for row in live.effects.rows()}
    assert rows == {"0.w": (1, 1), "1.0.weight": (1, 0), "1.0.bias": (1, 0)}
    assert [line.split()[-2:] for line in live.effects.table().splitlines()[2:]] == [
        ["100.0%", "1"],
        ["0.0%", "0"],
        ["0.0%", "0"],
    ]


def test_counts_are_written_to_the_files_and_summed_in_their_table(tmp_path: Path) -> None:
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = RunDirectory(tmp_path / "run")
    with attached(model, gs.Scale(2.0), None, optimizer, gs.Threshold(2.0)) as live:
        for step, sizes in enumerate(([3.0, 1.0], [1.0], [1.0, 5.0, 5.0])):
            for size in sizes:
                optimizer.zero_grad()
                model(size).backward()
                optimizer.step()
            run.append("effects.jsonl", [{"step": step, **row} for row in live.effects.fetch()])
    lines = (run.path / "effects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [(json.loads(line)["seen"], json.loads(line)["calls"]) for line in lines] == [
        (2, 1),
        (1, 0),
        (3, 2),
    ]
    (row,) = effect_table([run.path])
    assert (row["runs"], row["seen"], row["calls"]) == (1, 6, 3)
    assert "50.0%" in effect_text([row])
