"""What is said when a block ends: of what came into the model, and of clocks."""

import gc
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from weakref import ref

import pytest
import torch
from torch import nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from tests.nets import attached, backward, small, train, trainee

Change = Callable[[nn.Sequential], object]


def told(at: Selector, change: Change, frozen: bool = False) -> str:
    """The warnings of a block with a step before and one after a change."""
    model, optimizer = trainee()
    model.last.requires_grad_(not frozen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(model, gs.Identity(), at, optimizer):
            train(model, optimizer, 1)
            change(model)
            train(model, optimizer, 1)
    return " ".join(str(one.message) for one in caught)


def grow(model: nn.Sequential) -> None:
    model.last = nn.Linear(5, 5)
    model.append(nn.Linear(5, 3))


MODULES = r"modules were replaced or added .* not hooked.*: last, 3; attach"
PARAMS = r"parameters were replaced, added or unfrozen .* not hooked: last.weight, last.bias, 3.wei"


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (gs.Outputs(), MODULES),
        (gs.Inputs(), MODULES),
        (gs.Uses("*"), MODULES),
        (gs.ModuleGradients(), MODULES),
        (gs.Activations(), MODULES),
        (gs.SavedTensors(), MODULES),
        (gs.SavedTensors(node="Relu"), MODULES),
        (gs.EveryModule("re:last|3"), MODULES),
        (gs.Nodes("Addmm"), MODULES),
        (gs.Outputs() & gs.Outputs(types="Linear"), MODULES),
        (gs.Parameters(), PARAMS),
        (gs.Parameters(stage="backward_end"), PARAMS),
        (gs.Uses("*"), PARAMS),
        (gs.Outputs("first"), ""),
        (gs.Outputs(types="ReLU"), ""),
        (gs.Outputs().first(2), ""),
        (gs.Parameters("first.*"), ""),
        (gs.SavedTensors("block"), ""),
        (gs.EveryModule(), ""),
        (gs.EveryModule("Linear") | gs.EveryModule("first"), ""),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_selected_modules_and_parameters_that_came_into_the_open_block_are_told(
    at: Selector, text: str
) -> None:
    if text:
        assert re.search(text, told(at, grow))
    else:
        assert "while the block was open" not in told(at, grow)


@pytest.mark.parametrize(
    ("at", "is_told"),
    [
        (gs.Parameters(), True),
        (gs.Parameters(stage="step"), False),  # it joins
        (gs.Parameters("first.*"), False),
        (gs.Parameters(stage="backward_end"), True),
        (gs.Updates(), False),
        (gs.Uses("*"), False),  # it acts there
        (gs.Outputs(), False),
    ],
)
def test_a_parameter_that_is_trained_only_after_attaching_is_told(
    at: Selector, is_told: bool
) -> None:
    text = told(at, lambda model: model.last.requires_grad_(True), frozen=True)
    assert ("parameters were replaced, added or unfrozen" in text) == is_told
    assert ("not hooked: last.weight, last.bias; " in text) == is_told


def restore_random_state(model: nn.Sequential) -> None:
    first = model.first
    model.first = nn.Linear(6, 5)
    model.first = first


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        restore_random_state,
        lambda model: deepcopy(model).append(nn.Linear(3, 3)),
        lambda model: model.__delitem__(2),
        lambda model: model.__setitem__(2, torch.compile(model.last, backend="eager")),
    ],
    ids=["nothing", "put back", "a copy", "taken out", "compiled"],
)
def test_where_nothing_came_nothing_is_told(change: Change) -> None:
    assert "while the block was open" not in told(gs.Outputs("*"), change)


@pytest.mark.usefixtures("frozen_heap")
def test_what_was_in_the_model_is_not_held_by_the_block() -> None:
    model = small()
    at = gs.Parameters("*.weight")
    with pytest.warns(gs.SurgeryWarning, match="new ones"), attached(model, gs.Identity(), at):
        backward(model)
        gone = ref(model.last.weight)
        grow(model)
        gc.collect()
        assert gone() is None


def test_a_clock_that_stands_says_where_the_block_began() -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Identity(), when=gs.Steps(stop=2)))
    model, optimizer = trainee()
    with surgery.attach(model, optimizer):
        train(model, optimizer, 3)
    text = "never fired in 8 gradients; this block began at step 3"
    with pytest.warns(gs.SurgeryWarning, match=text), surgery.attach(model, optimizer):
        train(model, optimizer, 2)
    with pytest.warns(gs.SurgeryWarning) as caught, surgery.attach(model):
        backward(model)
    text = " ".join(str(warning.message) for warning in caught)
    assert "no optimizer step was counted since this block began, at step 5;" in text


def test_hooks_that_cpp_code_has_discarded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # experiments/hooks_tour/native_hooks.py does so; here the probe stands in for a compiler.
    monkeypatch.setattr("gradsurg.torch_internals.autograd.without_hooks", list)
    model, optimizer = trainee()
    text = r"C\+\+ code registered on first\.weight has discarded .* use stage='accumulated'"
    at = gs.Parameters("first.weight")
    with pytest.warns(gs.SurgeryWarning, match=text), attached(model, gs.Identity(), at):
        backward(model, 0)
    with attached(model, gs.Identity(), gs.Parameters(stage="accumulated")):
        backward(model, 0)
    with attached(model, gs.Identity(), gs.Parameters("first.*"), optimizer):
        train(model, optimizer, 1)
        with pytest.warns(gs.SurgeryWarning, match=r"code .* first\.weight, first\.bias"):
            train(model, optimizer, 1)
