"""The algebra of triggers on the command line, as in Python."""

import pytest

import gradsurg as gs
from gradsurg.experiment.overrides import prepared
from gradsurg.triggers.base import Trigger
from tests.builds import built
from tests.conftest import Here

STEPS, NORM = gs.Steps(start=10, stop=15), gs.Threshold(above=0.05, measure="norm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps(start=10, stop=15)", STEPS),
        ("steps(start=10,stop=15) & threshold(above=0.05, measure=norm)", STEPS & NORM),
        ("steps(start=10,stop=15) & threshold(above=5e-2, measure='norm') & always", None),
        ("~steps(start=10,stop=15)", ~STEPS),
        ("~steps(start=10,stop=15) | epochs(start=1)", ~STEPS | gs.Epochs(start=1)),
        ("(always | epochs(start=1)) & ~steps(start=10, stop=15)", None),
    ],
)
def test_an_expression_is_the_trigger_that_python_makes_of_it(
    text: str, expected: Trigger | None
) -> None:
    names = {"steps": gs.Steps, "threshold": gs.Threshold, "epochs": gs.Epochs, "norm": "norm"}
    if expected is None:
        expected = eval(text, {**names, "always": gs.Always()})
    words = prepared(["transform=clip", f"when={text}"])
    (item,) = built(*words).surgery.interventions
    assert item.when == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "steps(10)",
            "when: steps takes fields by name, such as steps(start=100), found 'steps(10)'",
        ),
        ("steps(start=1) and always()", "when: joins triggers by &, | and ~; steps("),
        ("steps(start=1+1j*2)", "when: 1 + 1j * 2 is not a number, a word or a list"),
        ("steps(start=1", "when: is not an expression, found 'steps(start=1'; write when='steps("),
        ("stps(start=1)", "when: there is no 'stps'. Did you mean 'steps'? There are: "),
        (
            "steps & ~(always | thrshold(above=1))",
            "when: there is no 'thrshold'. Did you mean 'threshold'? There are: all_of",
        ),
        (
            "~steps(strt=1)",
            "when.of.strt: is not a field here. Did you mean 'start'? There are: start, stop,",
        ),
    ],
)
def test_a_wrong_expression_is_one_line(here: Here, text: str, line: str) -> None:
    ended = here("transform=clip", f"when={text}")
    assert ended.code == 2
    assert ended.err.startswith(line)
    assert ended.err.count("\n") == 1


def test_other_words_stay_as_they_are() -> None:
    words = ["~when.of", "transform=clip", "when=steps", "site.pattern=a|b"]
    assert prepared(words) == words
