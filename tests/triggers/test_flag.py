"""Flag: a trigger that is switched from outside at any time."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from tests.nets import attached, backward, gradients, small


def _zeroed(model: torch.nn.Module) -> list[str]:
    return [name for name, grad in gradients(model).items() if not grad.any()]


@pytest.mark.filterwarnings("ignore:zero. its trigger never fired")
@pytest.mark.parametrize("on", [True, False])
def test_the_initial_position_is_that_of_the_field(on: bool) -> None:
    model = small()
    with attached(model, gs.Zero(), gs.Parameters("last.*"), when=gs.Flag("a", on)):
        backward(model)
    assert _zeroed(model) == (["last.weight", "last.bias"] if on else [])


def test_the_flag_is_switched_between_two_backward_passes_of_a_step() -> None:
    model, seen = small(), []
    with attached(model, gs.Zero(), when=gs.Flag("a")) as live:
        for on in (False, True, False):
            live.switch("a", on=on)
            model.zero_grad()
            backward(model)
            seen.append(len(_zeroed(model)))
    assert seen == [0, 4, 0]
    assert {entry.all_fired for entry in live.ledger} == {1}


def test_the_flag_is_switched_from_a_hook_during_a_backward() -> None:
    model = small()
    with attached(model, gs.Zero(), when=gs.Flag("a")) as live:

        def flip(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: live.switch("a", on=True))

        # The gradient of act is there after those of last, and before those of first.
        handle = model.act.register_forward_hook(flip)
        backward(model)
        handle.remove()
    assert _zeroed(model) == ["first.weight", "first.bias"]


def test_interventions_with_the_same_flag_share_one_switch() -> None:
    model = small()
    at = [gs.Parameters("first.*"), gs.Parameters("last.*")]
    surgery = gs.Surgery(
        gs.Intervention(gs.Zero(), at[0], gs.Flag("a")),
        gs.Intervention(gs.Zero(), at[1], ~gs.Flag("a")),
    )
    with surgery.attach(model) as live:
        backward(model)
        assert _zeroed(model) == ["last.weight", "last.bias"]
        live.switch("a", on=True)
        model.zero_grad()
        backward(model)
        assert _zeroed(model) == ["first.weight", "first.bias"]


def test_the_position_is_in_the_state_dict_and_kept_after_detaching() -> None:
    model = small()
    first, other = (
        gs.Surgery(gs.Intervention(gs.Zero(), when=gs.Flag("a", on=True))) for _ in range(2)
    )
    with first.attach(model) as live:
        backward(model)
        live.switch("a", on=False)
    assert first.state_dict()["flags"] == {"a": False}
    other.load_state_dict(first.state_dict())
    for surgery in (first, other):
        with surgery.attach(model) as live:
            model.zero_grad()
            backward(model)
            assert _zeroed(model) == []
            live.switch("a", on=True)
            backward(model)


def test_an_unknown_flag_is_refused_with_the_known_ones() -> None:
    model = small()
    with attached(
        model, gs.Zero(), when=gs.Flag("freeze", on=True) & gs.Flag("b", on=True)
    ) as live:
        with pytest.raises(LookupError) as caught:
            live.switch("frezee", on=True)
        assert str(caught.value) == (
            "did you mean 'freeze'? No trigger asks for a Flag 'frezee'. There are: freeze, b."
        )
        live.set("zero", when=gs.Flag("b", on=True))
        with pytest.raises(LookupError, match=r"There are: b\."):
            live.switch("freeze", on=True)
        wrong: Any = 1
        with pytest.raises(TypeError, match="on: must be True or False, found 1"):
            live.switch("b", on=wrong)
        backward(model)


def test_triggers_of_one_flag_must_agree_on_its_initial_position() -> None:
    model = small()
    surgery = gs.Surgery(
        gs.Intervention(gs.Zero(), when=gs.Flag("a")),
        gs.Intervention(gs.Zero(), when=gs.Flag("a", on=True)),
    )
    with (
        pytest.raises(ValueError, match="another trigger has this switch as on=False"),
        surgery.attach(model),
    ):
        pass
    with (
        pytest.raises(ValueError, match="another trigger has this switch as on=False"),
        attached(model, gs.Zero(), when=gs.Flag("a") & ~gs.Flag("a", on=True)),
    ):
        pass
