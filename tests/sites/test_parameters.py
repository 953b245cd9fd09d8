"""Parameters: which are selected, and the exact gradient at each stage."""

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from tests.nets import attached, num_hooks, sgd
from tests.sites.points import Sums, grad_of

# Optimizers


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_stage_step_acts_at_the_end_of_each_call_of_a_closure(
    as_keyword: bool, by_hand: bool
) -> None:
    model = Sums(1.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, lr=1.0)
    with attached(model, gs.Scale(-1.0), gs.Parameters(stage="step"), optimizer) as live:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([0.5]))
            loss.backward()
            if by_hand:
                live.before_step()
            return loss

        if as_keyword:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
        assert live.step == 1
    # One step of min(1, 1 / |g|_1) * lr against the reversed gradient -0.5.
    assert model.w.tolist() == [1.5]
    assert num_hooks(model, optimizer) == 0


# Order: tensor hooks, the accumulation, post-accumulate hooks, the optimizer's hooks.

STAGES = ("backward", "accumulated", "backward_end", "step")


def test_stages_follow_one_another_whatever_the_order_of_attaching() -> None:
    for order in (STAGES, STAGES[::-1]):
        model, met = Sums(), []
        optimizer = sgd(model, lr=0.0)

        def noted(name: str, met: list[str] = met) -> gs.Intervention:
            def note(grad: Tensor) -> Tensor:
                met.append(name)
                return grad + 1

            return gs.Intervention(note, gs.Parameters(stage=name), names=(name,))  # pyright: ignore[reportArgumentType]

        with gs.Surgery(*map(noted, order)).attach(model, optimizer):
            model(torch.tensor([1.0])).backward()
            assert grad_of(model.w) == [4.0]
            optimizer.step()
        assert met == list(STAGES)
        assert grad_of(model.w) == [5.0]
        assert num_hooks(model, optimizer) == 0


# Hooks of others


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _double_sum(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 2


@pytest.mark.parametrize("first", [True, False], ids=["theirs first", "ours first"])
@pytest.mark.parametrize(
    ("stage", "after_double", "after_double_sum"),
    [
        # Clipped to 1 by us, doubled by them: 2 if we are first, 1 if we are last.
        ("backward", None, 2.0),
        ("accumulated", 1.0, None),
        ("step", 1.0, 1.0),
    ],
)
def test_a_foreign_hook_keeps_its_position(
    stage, after_double: float | None, after_double_sum: float | None, first: bool
) -> None:
    in_turn = 1.0 if first else 2.0
    for register, expected in (
        ("register_hook", after_double),
        ("register_post_accumulate_grad_hook", after_double_sum),
    ):
        model = Sums()
        optimizer = sgd(model, lr=0.0)
        hook = _double if register == "register_hook" else _double_sum

        def add(model: Sums = model, register: str = register, hook: object = hook) -> None:
            getattr(model.w, register)(hook)

        if first:
            add()
        with attached(model, gs.Clip(1.0), gs.Parameters(stage=stage), optimizer) as live:
            if not first:
                add()
            model(torch.tensor([3.0])).backward()
            optimizer.step()
            assert grad_of(model.w) == [in_turn if expected is None else expected]
            is_listed = (
                f"beside hooks of others: {__name__}.{hook.__qualname__}" in live.ledger.table()
            )
            assert is_listed
        assert num_hooks(model) == 1
        model.zero_grad()
        model(torch.tensor([3.0])).backward()
        assert grad_of(model.w) == [6.0]
