"""A surgery's state inside `model.state_dict()`: out, in, and never where it was not asked for."""

import copy
import gc
import io
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.core.surgery import STATE_KEY, unpacked
from tests.nets import backward, num_hooks, sgd, small, train, trainee, weights

# What these surgeries have is asked for, not whether it acts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:scale. its trigger never fired"),
    pytest.mark.filterwarnings("ignore:Steps. no optimizer step was counted"),
]


def _surgery(beta: float = 0.5) -> gs.Surgery:
    """With a step clock, a switch, a transform with state and random numbers."""
    return gs.Surgery(
        gs.Intervention(gs.GrokfastEMA(beta), gs.Parameters("first.*")),
        gs.Intervention(gs.AddNoise(0.1), gs.Parameters("last.*"), gs.Steps(stop=4)),
        gs.Intervention(gs.Scale(0.5), gs.Parameters("last.bias"), gs.Flag("half", on=False)),
        seed=3,
    )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


def _saved(steps: int = 3) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What a model has saved after some steps, and the state of its surgery then."""
    (model, optimizer), surgery = trainee(), _surgery()
    with surgery.attach(model, optimizer, in_state_dict=True) as live:
        live.switch("half", on=True)
        train(model, optimizer, steps)
        # Copies: a state dict holds the parameters themselves.
        saved = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return saved, surgery.state_dict()


def _state_hooks(model: nn.Module) -> int:
    return len(model._state_dict_hooks) + len(model._load_state_dict_pre_hooks)


def test_what_was_interrupted_goes_on_as_if_it_had_not_been() -> None:
    whole, _ = _saved(6)
    saved, state = _saved(3)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=True)
    model, surgery = small(seed=1), _surgery()
    optimizer = sgd(model)
    with surgery.attach(model, optimizer, in_state_dict=True) as live:
        assert str(model.load_state_dict(read)) == "<All keys matched successfully>"
        assert live.step == 3
        assert _same(surgery.state_dict(), state)
        train(model, optimizer, 3, start=3)
    assert _same(model.state_dict(), {key: whole[key] for key in model.state_dict()})
    assert STATE_KEY in read  # what was given is left as it is


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_without_the_key_is_told_once(strict: bool) -> None:
    model, surgery = small(), _surgery()
    plain = small(seed=1).state_dict()
    with pytest.warns() as caught, surgery.attach(model, in_state_dict=True):
        for _ in range(2):
            result = model.load_state_dict(plain, strict=strict)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert [str(warning.message) for warning in caught] == [
            "in_state_dict: the loaded state has no '_gradsurg': the model is restored, the "
            "surgery keeps its present state"
        ]
        assert caught[0].category is gs.SurgeryWarning
        assert torch.equal(model.first.weight, plain["first.weight"])


@pytest.mark.filterwarnings("ignore:.*attached, but no gradient ever passed")
def test_a_state_that_was_loaded_before_the_surgery_was_attached_is_told() -> None:
    saved, _ = _saved()
    model = small(seed=1)
    model.load_state_dict(saved, strict=False)
    optimizer = torch.optim.Adam(model.parameters())
    with _surgery().attach(model, optimizer, in_state_dict=True):
        train(model, optimizer, 1)
    resumed = _surgery()
    with (
        pytest.warns(gs.SurgeryWarning, match="the optimizer has a state, as after a resume"),
        resumed.attach(model, optimizer, in_state_dict=True) as live,
    ):
        model.load_state_dict(saved)
        assert live.step == 3
    with resumed.attach(model, optimizer, in_state_dict=True):  # which has its state
        pass
    live = _surgery().start(model, in_state_dict=True)
    with pytest.warns(gs.SurgeryWarning, match="the optimizer has a state, as after a resume"):
        live.bind(optimizer)
    live.abort()


def test_the_state_of_another_surgery_is_refused_with_both_and_nothing_is_loaded() -> None:
    saved, _ = _saved()
    model, surgery = small(seed=1), _surgery(beta=0.75)
    before, state = weights(model), surgery.state_dict()
    with (
        pytest.raises(ValueError, match=r"this state is of .*0\.5.*, the surgery is .*0\.75"),
        surgery.attach(model, in_state_dict=True),
    ):
        model.load_state_dict(saved)
    assert all(map(torch.equal, before, weights(model)))
    assert _same(surgery.state_dict(), {**state, "flags": {"half": False}})
    assert (num_hooks(model), _state_hooks(model)) == (0, 0)


def test_inside_another_module_the_key_has_its_prefix() -> None:
    saved, state = _saved()
    outer = nn.ModuleDict({"model": small(seed=1), "other": nn.Linear(1, 1)})
    surgery = _surgery()
    with surgery.attach(outer["model"], in_state_dict=True):
        outer_state = outer.state_dict()
        assert f"model.{STATE_KEY}" in outer_state
        assert STATE_KEY not in outer_state
        inner = {f"model.{key}": tensor for key, tensor in saved.items()}
        outer.load_state_dict({**outer_state, **inner})
        assert _same(surgery.state_dict(), state)
        with pytest.warns(gs.SurgeryWarning, match=r"has no 'model\._gradsurg'"):
            del outer_state[f"model.{STATE_KEY}"]
            outer.load_state_dict(outer_state)
        backward(outer["model"])


def test_a_second_surgery_that_would_travel_is_refused_and_one_that_does_not_is_welcome() -> None:
    model = small()
    first, second = _surgery(), _surgery()
    with first.attach(model, in_state_dict=True):
        with (
            pytest.raises(ValueError, match="has another surgery's state already"),
            second.attach(model, in_state_dict=True),
        ):
            pass
        with second.attach(model):
            assert [key for key in model.state_dict() if STATE_KEY in key] == [STATE_KEY]
            backward(model)
        model.load_state_dict(model.state_dict())
    with second.attach(model, in_state_dict=True):
        assert STATE_KEY in model.state_dict()
        backward(model)
    assert (num_hooks(model), _state_hooks(model)) == (0, 0)


def test_a_copy_of_the_model_is_a_plain_one() -> None:
    saved, _ = _saved()
    model = small()
    with _surgery().attach(model, in_state_dict=True) as live:
        twin = copy.deepcopy(model)
        assert STATE_KEY not in twin.state_dict()
        assert STATE_KEY in model.state_dict()
        with pytest.raises(RuntimeError, match="Unexpected key"):
            twin.load_state_dict(saved)
        assert live.step == 0
        twin.load_state_dict(small().state_dict())  # a warning is an error
        another = _surgery()
        with another.attach(twin, in_state_dict=True):
            twin.load_state_dict(saved)
            assert another.state_dict()["step"] == 3
            backward(twin)
        backward(model)
    assert STATE_KEY not in twin.state_dict()


@pytest.mark.usefixtures("frozen_heap")
def test_a_saved_state_and_a_copy_hold_neither_model_nor_surgery() -> None:
    model, surgery = small(), _surgery()
    with surgery.attach(model, in_state_dict=True):
        backward(model)
        twin, saved = copy.deepcopy(model), model.state_dict()[STATE_KEY]
    weight, held = ref(model.first.weight), ref(surgery)
    del model, surgery
    gc.collect()
    assert (weight(), held()) == (None, None)
    assert STATE_KEY not in twin.state_dict()
    assert unpacked(saved)["step"] == 0


def test_the_tensors_of_a_state_come_to_where_the_model_is() -> None:
    states: Any = unpacked(_saved()[0][STATE_KEY], torch.device("meta"))["states"]
    tensors = [tensor for state in states.values() for tensor in state.values()]
    assert {tensor.is_meta for tensor in tensors} == {True}


def test_bytes_that_are_no_state_are_refused_and_code_among_them_is_not_run() -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return (print, ("run",))

    buffer = io.BytesIO()
    torch.save({"step": Bad()}, buffer)
    saved, _ = _saved()
    saved[STATE_KEY] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    model = small()
    with _surgery().attach(model, in_state_dict=True):
        with pytest.raises(Exception, match="Weights only load failed"):
            model.load_state_dict(saved)
        backward(model)
