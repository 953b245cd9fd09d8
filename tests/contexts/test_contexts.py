"""The documented table of site kinds and contexts agrees with the behaviour."""

from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import pytest
import torch

import gradsurg as gs
from gradsurg.plugins.registry import find, names
from tests.contexts.contexts import CONTEXTS, PROCESS_CONTEXTS, Order, trained
from tests.contexts.kinds import KINDS, Kind
from tests.contexts.table import BEGIN, COLUMNS, END, README, TORCHRUN, column, outcome

FINE = {"acts", "refused", "reported", "warned", "n/a"}


def _documented() -> dict[str, str]:
    text = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines}


WRITE = "python -m tests.contexts.table writes the table anew"


def _cells(name: str) -> list[str]:
    return [cell.strip() for cell in _documented()[name].split("|")[2:-1]]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_documented_row_agrees_with_the_behaviour(name: str, compiles: bool) -> None:
    for context, documented in zip(CONTEXTS, _cells(name), strict=False):
        if ("compile" in context) == compiles:
            cell = outcome(KINDS[name], context)[0]
            assert cell in FINE
            assert cell == documented, f"{context}: {WRITE}"


@pytest.mark.parametrize(
    "context",
    [
        *(pytest.param(context, marks=pytest.mark.slow) for context in PROCESS_CONTEXTS),
        pytest.param(TORCHRUN, marks=pytest.mark.full),
    ],
)
def test_the_documented_column_of_several_processes_agrees_with_the_behaviour(context: str) -> None:
    cells = column(context)
    assert {*cells.values()} <= FINE
    place = COLUMNS.index(context)
    assert {name: _cells(name)[place] for name in KINDS} == cells, WRITE


def test_every_kind_of_site_has_a_row() -> None:
    classes = {type(kind.make()) for kind in KINDS.values()}
    assert {cls.__name__ for cls in classes} | {"Combined"} == {
        find("sites", stem).__name__ for stem in names("sites")
    }


def test_the_documented_table_has_all_rows_and_columns() -> None:
    documented = _documented()
    assert [name for name in documented if name != "site"] == list(KINDS)
    assert _cells("site") == list(COLUMNS)


def test_a_site_that_silently_does_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CONTEXTS["eager"]

    def ignoring(kind: Kind, attach: object) -> object:
        return plain(kind, lambda *args, **kwargs: nullcontext())

    monkeypatch.setitem(CONTEXTS, "eager", ignoring)
    assert outcome(KINDS["Outputs"], "eager")[0] == "IGNORED"


def _compiled_as_eager(name: str, backend: str) -> None:
    kind = KINDS[name].make()
    # Nodes are those of one compiled graph: the table has them as refused.
    at = kind if isinstance(kind, gs.Nodes) else replace(kind, pattern="*")
    torch.compiler.reset()
    weights, counts = trained(at, "never", backend)
    for order in get_args(Order)[1:]:
        torch.compiler.reset()
        if isinstance(kind, gs.Nodes) and backend != "eager":
            with pytest.raises(LookupError, match="is compiled runs as one node: use Outputs"):
                trained(at, order, backend)
            continue
        weights_here, counted = trained(at, order, backend)
        assert counted == counts, order
        for weight, other in zip(weights_here, weights, strict=True):
            torch.testing.assert_close(weight, other, msg=order)
    torch.compiler.reset()


NOISE = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
    "ignore:Using `torch.compile.module.` when there are global hooks",
    "ignore:.*chooses by itself what it saves:gradsurg.SurgeryWarning",
    "ignore:.*not linear:gradsurg.SurgeryWarning",
)


@pytest.mark.filterwarnings(*NOISE)
@pytest.mark.parametrize("name", ["Outputs", "Parameters backward"])
def test_compiled_training_has_the_weights_and_counts_of_eager_training(name: str) -> None:
    _compiled_as_eager(name, "eager")


@pytest.mark.filterwarnings(*NOISE)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.full),
        pytest.param("aot_eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_site_trains_a_compiled_model_like_an_eager_one(
    name: str, backend: str
) -> None:
    _compiled_as_eager(name, backend)
