"""Triggers that join others: on the command line they are a list of nodes, like in a yaml file."""

import pytest

import gradsurg as gs
from gradsurg.triggers.base import Trigger
from tests.builds import built, faults

STEPS, NORM = gs.Steps(start=10, stop=15), gs.Threshold(above=0.05, measure="norm")
FIRST = "{_target_: gradsurg.Steps, start: 10, stop: 15}"
SECOND = "{_target_: gradsurg.Threshold, above: 0.05, measure: norm}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["when=all_of", f"when.of=[{FIRST},{SECOND}]"], STEPS & NORM),
        (["when=any_of", f"when.of=[{FIRST},{SECOND}]"], STEPS | NORM),
        (["when=unless", "when.of.start=10", "when.of.stop=15"], ~STEPS),
        (
            ["when=all_of", f"when.of=[{FIRST},{{_target_: gradsurg.Unless, of: {SECOND}}}]"],
            STEPS & ~NORM,
        ),
    ],
)
def test_a_list_of_nodes_is_the_trigger_that_python_makes(
    words: list[str], expected: Trigger
) -> None:
    (item,) = built("transform=clip", *words).surgery.interventions
    assert item.when == expected


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            f"[{FIRST},{{_target_: gradsurg.Thrshold}}]",
            "when.of.1: did you mean 'gradsurg.Threshold'? ",
        ),
        (
            f"[{FIRST},{{_target_: gradsurg.Steps, strt: 1}}]",
            "when.of.1.strt: did you mean 'start'?",
        ),
        (f"[{FIRST},{{start: 1}}]", "when.of.1: must be a Trigger, found {'start': 1}"),
    ],
)
def test_a_wrong_trigger_in_a_list_is_one_line(given: str, line: str) -> None:
    (said,) = faults(f"transform=clip when=all_of 'when.of={given}'")
    assert said.startswith(line)
