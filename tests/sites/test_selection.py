"""Selection: fields of selectors, and the errors if they select nothing."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from tests.nets import attached, small


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.LayerNorm(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra = nn.ParameterList([torch.zeros(4), torch.zeros(2, 3)])


EVERY = [
    "scale",
    "blocks.0.0.weight",
    "blocks.0.0.bias",
    "blocks.0.1.weight",
    "blocks.0.1.bias",
    "blocks.1.0.weight",
    "blocks.1.0.bias",
    "blocks.1.1.weight",
    "blocks.1.1.bias",
    "extra.0",
    "extra.1",
]


@pytest.mark.parametrize("pattern", ["first", "first.w", "weight", "re:first", "FIRST.*"])
def test_a_pattern_must_match_the_full_name(pattern: str) -> None:
    with pytest.raises(LookupError, match=f"nothing matches '{re.escape(pattern)}'"):
        gs.Parameters(pattern).find(small())


def test_a_pattern_that_matches_nothing_lists_the_choices_and_the_nearest() -> None:
    with (
        pytest.raises(LookupError) as caught,
        attached(small(), gs.Zero(), gs.Parameters("frst.*")),
    ):
        pass
    assert str(caught.value) == (
        "Parameters.pattern: nothing matches 'frst.*'. There are: first.weight, first.bias, "
        "last.weight, last.bias. Did you mean 'first.*'?"
    )


@pytest.mark.parametrize("start", ["first", "*"])
def test_the_nearest_name_that_matches_is_suggested_once(start: str) -> None:
    with pytest.raises(LookupError) as caught:
        gs.Parameters(f"{start}.wieght").find(small())
    assert str(caught.value).count("Did you mean") == 1
    assert f"Did you mean '{start}.weight'?" in str(caught.value)


def test_a_pattern_that_matches_only_frozen_parameters_is_refused() -> None:
    model = small()
    model.first.requires_grad_(False)
    with pytest.raises(LookupError, match=re.escape("'first.*' matches is frozen: first.weight, ")):
        attached(model, gs.Zero(), gs.Parameters("first.*"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"types": "Linear"}, [1, 2, 5, 6]),
        ({"types": nn.Linear}, [1, 2, 5, 6]),
        ({"types": "L*"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"types": "re:Linear|ParameterList"}, [1, 2, 5, 6, 9, 10]),
        ({"types": Net}, [0]),
        ({"depth": 0}, [0]),
        ({"depth": 1}, [9, 10]),
        ({"depth": (0, 1)}, [0, 9, 10]),
        ({"depth": [3, 9]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"index": 0}, [1, 2, 5, 6, 9]),
        ({"index": 1, "pattern": "blocks.0.*"}, [3, 4]),
        ({"ndim": 0}, [0]),
        ({"ndim": 2}, [1, 5, 10]),
        ({"ndim": (1, 9)}, list(range(1, 11))),
        ({"size": 4}, [9]),
        ({"size": (4, 6)}, [1, 5, 9, 10]),
        ({"types": "Linear", "ndim": 1, "pattern": "re:.*1.*"}, [6]),
    ],
    ids=str,
)
def test_fields_select_by_type_depth_index_and_shape(
    fields: dict[str, Any], expected: list[int]
) -> None:
    assert gs.Parameters(**fields).find(Net()) == [EVERY[number] for number in expected]


def test_a_base_class_selects_its_subclasses() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(2, 2), nn.Linear(2, 2))
    assert gs.Parameters(types=nn.Linear).find(model) == gs.Parameters().find(model)
    assert gs.Parameters(types=Mine).find(model) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": -1}, "Parameters.depth: must be a number >= 0 or two of them, low and high"),
        ({"ndim": (1, 2, 3)}, "Parameters.ndim: must be a number >= 0 or two of them"),
        ({"types": ""}, "Parameters.types: must not be empty"),
        ({"types": "re:("}, "Parameters.types: is not a regular expression"),
    ],
)
def test_an_invalid_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=re.escape(message)):
        gs.Parameters(**fields)


def test_the_error_names_the_fields_that_select_nothing() -> None:
    with pytest.raises(LookupError, match=re.escape("nothing matches '*' with 'types=Conv2d, dep")):
        gs.Parameters(types=nn.Conv2d, depth=1).find(small())
