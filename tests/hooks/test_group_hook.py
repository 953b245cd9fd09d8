"""All gradients of a group together: late results, and parameters that are replaced."""

import gc
from collections.abc import Callable, Iterable, Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import GroupTransform, Need, TransformContext, TransformState
from tests.nets import attached, backward, gradients, sgd, small, train, trainee

STEP = gs.Parameters(stage="step")


class UserGroup(GroupTransform):
    """A user's transform of a group by a function of its gradients and contexts."""

    needs: frozenset[Need] = frozenset({"value"})  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, function: Callable[..., Iterable[Tensor]]) -> None:
        self.function = function

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        return self.function(grads, contexts), state


def test_no_link_of_a_group_runs_in_autocast() -> None:
    model = small()
    optimizer, dtypes = sgd(model), set[torch.dtype]()

    def note(grad: Tensor) -> Tensor:
        dtypes.add((grad.view(-1, 1) @ grad.view(1, -1)).dtype)
        return grad.clone()

    with attached(model, gs.Chain(gs.ClipGlobalNorm(1.0), note), STEP, optimizer):
        backward(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert dtypes == {torch.float32}


def test_a_users_generator_reads_the_gradients_and_not_the_results_of_others() -> None:
    model, optimizer = trainee()
    by_sum = UserGroup(lambda grads, _: (grad / sum(x.norm() for x in grads) for grad in grads))
    with attached(model, by_sum, STEP, optimizer):
        backward(model)
        before = gradients(model)
        optimizer.step()
    total = sum(grad.norm() for grad in before.values())
    torch.testing.assert_close(
        gradients(model), {name: grad / total for name, grad in before.items()}
    )


WRONG = {
    "short": lambda grads, _: [*(grad * 2 for grad in grads[:-1]), grads[-1][:1]],
    "too few": lambda grads, _: [grad * 2 for grad in grads[:-1]],
    "draws": lambda grads, _: (grad * torch.rand(()) for grad in grads),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_of_a_users_group_leaves_all_gradients_as_they_were(wrong: str) -> None:
    model, optimizer = trainee()
    with attached(model, UserGroup(WRONG[wrong]), STEP, optimizer):
        backward(model)
        before = gradients(model)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            optimizer.step()
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("at", [STEP, gs.Updates()], ids=repr)
def test_a_group_reads_the_parameters_that_the_optimizer_holds_now(at: gs.Parameters) -> None:
    model = small()
    optimizer, seen = sgd(model), list[list[float]]()

    def note(grads: Sequence[Tensor], contexts: Sequence[TransformContext]) -> Sequence[Tensor]:
        values = [c.value.detach() for c in contexts if c.value is not None]
        seen.append([float(value.sum()) for value in values])
        return [grad.clone() for grad in grads]

    with attached(model, UserGroup(note), at, optimizer):
        train(model, optimizer, 1)
        model.last.weight = nn.Parameter(torch.full((3, 5), 7.0))
        optimizer.param_groups[0]["params"] = [*model.last.parameters()]
        model.first.requires_grad_(False)
        expected = [float(param.detach().sum()) for param in model.last.parameters()]
        train(model, optimizer, 1)
    assert seen[1] == expected


@pytest.mark.usefixtures("frozen_heap")
def test_a_group_gets_the_values_and_does_not_hold_them() -> None:
    model, optimizer = trainee(0.0)
    by_value = UserGroup(
        lambda grads, of: [g * c.value.detach() for g, c in zip(grads, of, strict=True)]
    )
    with attached(model, by_value, STEP, optimizer) as live:
        backward(model)
        grads = gradients(model)
        optimizer.step()
    expected = {name: param.detach() * grads[name] for name, param in model.named_parameters()}
    torch.testing.assert_close(gradients(model), expected)
    held = ref(model.first.weight)
    del model, optimizer
    gc.collect()
    assert held() is None
    assert live.effects.rows()
