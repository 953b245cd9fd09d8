"""The errors of wrong fields."""

import sys
from dataclasses import KW_ONLY, FrozenInstanceError
from inspect import signature
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import gradsurg as gs
from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.messages import similar, unknown
from gradsurg.plugins.reductions import NormOrder, Per


@validated
class Probe:
    """One field of each kind."""

    size: Annotated[float, Field(gt=0, le=10)] = 1.0
    count: Annotated[int, Field(ge=0, lt=5)] = 1
    _: KW_ONLY
    kind: Literal["red", "blue"] = "red"
    flag: bool = False
    word: str = ""
    per: Per = "tensor"
    p: NormOrder = 2.0
    low: float | None = None
    part: Any = None

    def __post_init__(self) -> None:
        if self.low is not None and self.low > self.size:
            raise Contradiction("low", f"must be <= size, found low={self.low}, size={self.size}")


@validated
class Needy:
    """A field without a default."""

    factor: float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "Probe.size: must be > 0, such as 1.0, found 0"),
        ({"size": 11}, "Probe.size: must be <= 10, found 11"),
        ({"count": -1}, "Probe.count: must be >= 0, found -1"),
        ({"count": 5}, "Probe.count: must be < 5, found 5"),
        ({"count": 1.5}, "Probe.count: must be a whole number, found 1.5"),
        ({"count": "one"}, "Probe.count: must be a whole number, found 'one'"),
        ({"size": "big"}, "Probe.size: must be a number, found 'big'"),
        ({"size": None}, "Probe.size: must be a number, found None"),
        ({"size": float("nan")}, "Probe.size: must be finite, found nan"),
        ({"low": float("inf")}, "Probe.low: must be finite, found inf"),
        ({"kind": "green"}, "Probe.kind: must be one of 'red' or 'blue', found 'green'"),
        ({"flag": "perhaps"}, "Probe.flag: must be true or false, found 'perhaps'"),
        ({"word": 3}, "Probe.word: must be a string, found 3"),
        ({"p": 0.5}, "Probe.p: must be >= 1, found 0.5"),
        ({"low": 2.0}, "Probe.low: must be <= size, found low=2.0, size=1.0"),
    ],
)
def test_a_fault_names_field_rule_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        Probe(**values)
    assert str(caught.value) == message


def test_all_faults_are_told_at_once_one_a_line() -> None:
    wrong: dict[str, Any] = {"size": -1, "count": 9, "kind": "green"}
    with pytest.raises(FieldError) as caught:
        Probe(**wrong)
    assert [field for field, _ in caught.value.faults] == ["size", "count", "kind"]
    assert len(str(caught.value).splitlines()) == 3


def test_an_unknown_field_is_told_the_nearest() -> None:
    wrong: dict[str, Any] = {"sise": 1.0}
    with pytest.raises(FieldError, match=r"Probe\.sise: did you mean 'size'\? There is no field"):
        Probe(**wrong)


def test_a_value_without_a_name_is_named_all_the_same() -> None:
    with pytest.raises(FieldError, match=r"^Probe\.count: must be < 5, found 7$"):
        Probe(1.0, 7)


def test_a_value_that_is_given_twice_is_refused() -> None:
    wrong: dict[str, Any] = {"size": 2.0}
    with pytest.raises(FieldError, match=r"^Probe\.size: is given twice$"):
        Probe(1.0, **wrong)


@validated
class Named:
    """Fields that all need their names."""

    _: KW_ONLY
    size: float = 1.0
    kind: Literal["red", "blue"] = "red"


@validated
class Bare:
    """No fields."""


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Probe, [1.0, 2, "blue"], "takes at most 2 values without a name: size, count"),
        (Named, ["red"], "takes no values without a name. There are: size, kind."),
        (Bare, ["red"], "takes no values"),
    ],
)
def test_too_many_values_without_a_name_are_refused(
    kind: Any, values: list[Any], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        kind(*values)
    assert str(caught.value) == f"{kind.__name__}: {message}"


Share = Annotated[float, Field(ge=0, le=1)]


@validated
class Either:
    """Fields of one of several kinds."""

    share: Share | Annotated[tuple[Share, ...], Field(min_length=1)] = 0.0
    _: KW_ONLY
    report: Annotated[Literal["auto"] | bool | None, Field()] = "auto"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 2}, "Either.share: must be <= 1, found 2"),
        ({"share": float("nan")}, "Either.share: must be finite, found nan"),
        ({"share": [0.5, 2]}, "Either.share.1: must be <= 1, found 2"),
        ({"share": [0.5, "much"]}, "Either.share.1: must be a number, found 'much'"),
        ({"share": []}, "Either.share: must have at least 1 item, found []"),
        ({"share": "much"}, "Either.share: must be a number or a list, found 'much'"),
        ({"share": None}, "Either.share: must be a number or a list, found None"),
        ({"report": "no "}, "Either.report: must be one of 'auto' or true or false, found 'no '"),
    ],
)
def test_of_several_kinds_the_fault_is_that_of_the_one_it_is(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        Either(**values)
    assert str(caught.value) == message


def test_faults_of_several_kinds_stand_beside_others() -> None:
    wrong: dict[str, Any] = {"share": 2, "report": 3, "size": 1}
    with pytest.raises(FieldError) as caught:
        Either(**wrong)
    assert sorted(field for field, _ in caught.value.faults) == ["report", "share", "size"]
    wrong_place: list[Any] = [2]
    with pytest.raises(FieldError, match=r"^Either\.share: must be <= 1, found 2$"):
        Either(*wrong_place)


def test_a_missing_field_is_told() -> None:
    nothing: dict[str, Any] = {}
    with pytest.raises(FieldError, match=r"^Needy\.factor: is required$"):
        Needy(**nothing)


def test_a_wrong_per_is_told_the_choices() -> None:
    with pytest.raises(FieldError, match=r"^Probe\.per: must be tensor, unit, entry or an einops"):
        Probe(per="row")


def test_it_is_a_value() -> None:
    probe: Any = Probe(2.0, p=float("inf"))
    assert probe == Probe(size=2, p=float("inf"))
    assert hash(probe) == hash(Probe(size=2, p=float("inf")))
    assert "size=2.0" in repr(probe)
    with pytest.raises(FrozenInstanceError):
        probe.size = 3.0


def test_the_signature_shows_types_and_defaults_without_validators() -> None:
    assert str(signature(gs.Clip)) == "(value: float = 0.01) -> None"
    assert "Validator" not in str(signature(gs.Outputs))
    assert not hasattr(gs.Clip(), "__signature__")


def test_an_unknown_name_lists_the_choices_and_asks() -> None:
    clip = "did you mean 'clip'? No. There are: clip, zero."
    assert unknown("no", "clp", ["clip", "zero"]) == clip
    assert unknown("no", "PCGrad", ["pcgrad", "upgrad"]).startswith("did you mean 'pcgrad'? No. ")
    assert unknown("no", "qqq", ["clip"]) == "no. There are: clip."
    assert unknown("no", "clip", []) == "no. There are: none."
    assert unknown("no", "", ["a" * 300]) == f"no. There are: {'a' * 300}."


NAMES = [f"name{n}" for n in range(40)]


def test_an_unknown_name_gives_the_suggestion_first_and_a_whole_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = "there is no 'nme7'"
    said = "did you mean 'name7'? There is no 'nme7'."
    assert unknown(fault, "nme7", ["name7"]) == said
    assert unknown(fault, "nme7", NAMES) == said
    listed = unknown(fault, "nme7", NAMES, listed_by="--list names")
    assert listed == f"{said} All of them: python -m gradsurg.run --list names"
    assert unknown(fault, "qqq", ["clip"]) == f"{fault}. There are: clip."
    few = ", ".join(NAMES[:7])
    more = unknown(fault, "qqq", NAMES, listed_by="--list names")
    assert (
        more == f"{fault}. There are: {few}, ... and 33 more: python -m gradsurg.run --list names"
    )
    monkeypatch.setattr(sys, "argv", ["gradsurg run"])
    assert unknown(fault, "nme7", NAMES, listed_by="--list names").endswith(
        " All of them: gradsurg run --list names"
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sted", ["site", "seed"]),
        ("step", ["steps"]),
        ("transfrom", ["transform"]),
        ("LR_", ["lr"]),
        ("nothing", []),
    ],
)
def test_a_second_name_is_suggested_if_it_is_as_near(name: str, near: list[str]) -> None:
    assert similar(name, ["transform", "site", "study", "steps", "seeds", "seed", "lr"]) == near
