"""Every kind of site in the situations that all of them meet."""

import pytest

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import find, names
from tests.contexts.situations import ROWS, SITUATIONS


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_kind_of_site_in_a_situation(kind: str, situation: str) -> None:
    SITUATIONS[situation](ROWS[kind])


MODULES: dict[str, object] = {"call": -1, "depth": (2, 1), "index": "first", "types": "re:("}
PARAMETERS: dict[str, object] = {"ndim": -1, "size": 1.5, "depth": True, "types": ""}
INVALID: dict[str, dict[str, object]] = {
    "Activations": MODULES | {"side": "both", "backward": "twice"},
    "Buckets": PARAMETERS | {"reduce": "sum"},
    "Captured": MODULES | {"ndim": -1},
    "EveryModule": {"kind": "backward", "types": ""},
    "Inputs": MODULES | {"path": "both"},
    "ModuleGradients": MODULES | {"kind": "backward"},
    "Nodes": {"module": "re:[", "side": "both", "edge": 1, "occurrence": -1},
    "Outputs": MODULES,
    "Parameters": PARAMETERS,
    "SavedTensors": MODULES | {"node": "re:(", "of": "weights"},
    "Updates": PARAMETERS,
    "Uses": {"use": -1},
    "Weights": PARAMETERS,
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_fields_are_refused_by_name(kind: str) -> None:
    make = getattr(gs, kind)
    common = [("pattern", ""), ("pattern", "re:("), ("stage", "never")]
    for field, wrong in [*common, *INVALID[kind].items()]:
        with pytest.raises(FieldError, match=rf"^{kind}\.{field}: "):
            make(**{"pattern": "*", field: wrong})


def test_every_kind_has_a_row_and_invalid_fields() -> None:
    classes = {find("sites", stem).__name__ for stem in names("sites")} - {"Combined"}
    assert {row.cls for row in ROWS.values()} == classes, "KINDS in tests/contexts/situations.py"
    assert {*INVALID} == classes, "INVALID above"


def test_what_differs_is_a_situation() -> None:
    assert {name for row in ROWS.values() for name in row.differs} <= {*SITUATIONS}
