"""The table of what works where says what happens, and nothing is silently ignored."""

from contextlib import nullcontext

import pytest

from gradsurg.catalogue import find, names
from tests.contexts.contexts import CONTEXTS
from tests.contexts.kinds import KINDS, Kind
from tests.contexts.table import BEGIN, END, README, outcome, row

FINE = {"acts", "refused", "reported", "warned", "n/a"}


def _documented() -> dict[str, str]:
    text = README.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_documented_row_is_what_happens(name: str) -> None:
    line = row(name)
    assert {cell.strip() for cell in line.split("|")[2:-1]} <= FINE
    assert _documented()[name] == line, "python -m tests.contexts.table writes the table anew"


def test_every_kind_of_site_acts_in_plain_training() -> None:
    for name, kind in KINDS.items():
        assert outcome(kind, "eager")[0] == "acts", name


def test_every_kind_of_site_has_a_row() -> None:
    made = {type(kind.make()) for kind in KINDS.values()}
    assert {cls.__name__ for cls in made} | {"Combined"} == {
        find("sites", stem).__name__ for stem in names("sites")
    }


def test_the_documented_table_has_these_rows_and_columns() -> None:
    documented = _documented()
    assert [name for name in documented if name != "site"] == list(KINDS)
    assert [cell.strip() for cell in documented["site"].split("|")[2:-1]] == list(CONTEXTS)


def test_what_does_nothing_and_says_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CONTEXTS["eager"]

    def ignoring(kind: Kind, attach: object) -> object:
        return plain(kind, lambda *args, **kwargs: nullcontext())

    monkeypatch.setitem(CONTEXTS, "eager", ignoring)
    assert outcome(KINDS["Outputs"], "eager")[0] == "IGNORED"
