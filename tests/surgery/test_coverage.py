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
from gradsurg.sites.base import Selector
from tests.nets import attached, backward, sgd, small, train

X = torch.ones(2, 6)
Change = Callable[[nn.Sequential], object]


def warnings_of(at: Selector, change: Change) -> str:
    """The warnings of a block with a forward and a backward before and after a change."""
    model = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(model, gs.Identity(), at):
            model(X).sum().backward()
            change(model)
            model(X).sum().backward()
    return " ".join(
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, gs.SurgeryWarning)
    )


def grow(model: nn.Sequential) -> None:
    model.last = nn.Linear(5, 5)
    model.append(nn.Linear(5, 3))


@pytest.mark.parametrize(
    "at",
    [
        gs.Outputs(),
        gs.Inputs(),
        gs.Uses("*"),
        gs.ModuleGradients(),
        gs.Activations(),
        gs.SavedTensors(),
        gs.SavedTensors(node="Relu"),
        gs.EveryModule("re:last|3"),
        gs.Nodes("Addmm"),
        gs.Outputs() & gs.Outputs(types="Linear"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_modules_that_came_while_the_block_was_open_are_told(at: Selector) -> None:
    text = warnings_of(at, grow)
    assert re.search(r"modules were replaced or added .* not hooked.*: last, 3; attach", text)


@pytest.mark.parametrize(
    "at", [gs.Parameters(), gs.Parameters(stage="backward_end"), gs.Uses("*")], ids=str
)
def test_parameters_that_came_while_the_block_was_open_are_told(at: Selector) -> None:
    text = warnings_of(at, grow)
    assert "parameters were replaced, added or unfrozen" in text
    assert "not hooked: last.weight, last.bias, 3.weight, 3.bias; attach" in text


@pytest.mark.parametrize(
    "at",
    [
        gs.Outputs("first"),
        gs.Outputs(types="ReLU"),
        gs.Outputs().first(2),
        gs.Parameters("first.*"),
        gs.SavedTensors("block"),
        gs.EveryModule(),
        gs.EveryModule("Linear") | gs.EveryModule("first"),
    ],
    ids=["name", "types", "first", "parameters", "block", "every", "by class"],
)
def test_those_that_would_not_have_been_selected_or_are_met_are_not_told(at: Selector) -> None:
    assert "came" not in warnings_of(at, grow)


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
    ids=str,
)
def test_a_parameter_that_is_trained_only_after_attaching_is_told(
    at: Selector, is_told: bool
) -> None:
    model = small()
    optimizer = sgd(model)
    model[2].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(model, gs.Identity(), at, optimizer):
            train(model, optimizer, 1)
            model[2].requires_grad_(True)
            train(model, optimizer, 1)
    told = " ".join(str(item.message) for item in caught)
    assert ("parameters were replaced, added or unfrozen" in told) == is_told
    assert ("not hooked: last.weight, last.bias; " in told) == is_told


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
    assert "came" not in warnings_of(gs.Outputs("*"), change)


def test_an_intervention_added_after_the_change_knows_what_came() -> None:
    model = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(model, gs.Identity(), gs.Outputs("first")) as live:
            grow(model)
            live.add(gs.Intervention(gs.Scale(2.0), gs.Outputs()))
            backward(model)
    assert [str(warning.message) for warning in caught] == []


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
    model = small()
    optimizer = sgd(model)
    with surgery.attach(model, optimizer):
        train(model, optimizer, 3)
    with (
        pytest.warns(
            gs.SurgeryWarning, match="never fired in 8 gradients; this block began at"
        ) as w,
        surgery.attach(model, optimizer),
    ):
        train(model, optimizer, 2)
    assert "step 3" in str(w[0].message)
    with (
        pytest.warns(gs.SurgeryWarning) as w,
        surgery.attach(model),
    ):
        backward(model)
    text = " ".join(str(warning.message) for warning in w)
    assert "no optimizer step was counted since this block began, at step 5;" in text


def test_hooks_that_cpp_code_has_discarded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # experiments/hooks_tour/native_hooks.py does so; here the probe stands in for a compiler.
    monkeypatch.setattr("gradsurg.torch_internals.autograd.without_hooks", list)
    model = small()
    text = r"C\+\+ code registered on first\.weight has discarded .* use stage='accumulated'"
    with (
        pytest.warns(gs.SurgeryWarning, match=text),
        attached(model, gs.Identity(), gs.Parameters("first.weight")),
    ):
        backward(model, 0)
    with attached(model, gs.Identity(), gs.Parameters(stage="accumulated")):
        backward(model, 0)


def test_hooks_that_cpp_code_has_discarded_are_told_in_the_first_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    optimizer = sgd(model)
    monkeypatch.setattr("gradsurg.torch_internals.autograd.without_hooks", list)
    with attached(model, gs.Identity(), gs.Parameters("first.*"), optimizer):
        train(model, optimizer, 1)
        with pytest.warns(gs.SurgeryWarning, match=r"code .* first\.weight, first\.bias"):
            train(model, optimizer, 1)
