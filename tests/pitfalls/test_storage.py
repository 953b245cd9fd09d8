"""Pitfalls of shared memory, at every gradient, for users' transforms and built-in ones."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import (
    GroupTransform,
    Need,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from tests.nets import attached, backward, batch, sgd, small, train, weights

TENSOR = [gs.Parameters(stage=stage) for stage in gs.Parameters.stages]
GROUP = [gs.Parameters(stage=stage) for stage in gs.Parameters.group_stages]
ELEMENTWISE: frozenset[TransformProperty]
ELEMENTWISE = frozenset({"elementwise", "deterministic", "linear", "idempotent"})


@validated
class Mean(Transform):
    """A running mean that is both result and state, as users would write it."""

    view: bool = False

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return ELEMENTWISE

    def init(self, grad: Tensor) -> TransformState:
        return {"mean": torch.zeros_like(grad)}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        mean = 0.9 * state["mean"] + grad
        return mean.view_as(mean) if self.view else mean, {"mean": mean}


@validated
class Means(GroupTransform):
    """The same for a group; from the second step on it may violate a rule."""

    fault: str = ""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return ELEMENTWISE

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"value"})

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {str(index): torch.zeros_like(grad) for index, grad in enumerate(grads)}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        means = [0.9 * state[str(index)] + grad for index, grad in enumerate(grads)]
        after = {str(index): mean for index, mean in enumerate(means)}
        if contexts[0].step and self.fault:
            values = [one.value.detach() for one in contexts if one.value is not None]
            return (values if self.fault == "value" else [g.mul_(2.0) for g in grads]), after
        return means, after


def trained(transform: Transform, at: Selector, to_none: bool = True) -> list[Tensor]:
    """Return the weights after three steps, with gradients set to None or zeroed in between."""
    model = small()
    optimizer = sgd(model)
    with attached(model, transform, at, optimizer):
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, step)
            optimizer.step()
    return weights(model)


FAULTS = {"in place": "changed the gradient in place", "value": "returned the storage of the value"}


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", TENSOR, ids=repr)
def test_p06_p08_a_fault_of_a_function_is_refused_at_every_gradient(
    at: Selector, fault: str
) -> None:
    model, calls = small(), []

    def at_first_not(grad: Tensor) -> Tensor:
        # Late: by then the first gradients have shown no fault.
        if grad.shape != model.first.weight.shape or len(calls) < 2:
            calls.extend([None] * (grad.shape == model.first.weight.shape))
            return grad * 1.0
        return grad.mul_(2.0) if fault == "in place" else model.first.weight.detach()

    surgery = gs.Surgery(gs.Intervention(at_first_not, at=at))
    with (
        pytest.raises(RuntimeError, match=f"{FAULTS[fault]}.*site 'first.weight'"),
        surgery.attach(model, optimizer := sgd(model)),
    ):
        train(model, optimizer, 3)
    assert len(calls) == 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", GROUP, ids=repr)
def test_p08_a_fault_of_a_group_transform_is_refused_at_every_backward(
    at: Selector, fault: str
) -> None:
    with pytest.raises(RuntimeError, match=f"{FAULTS[fault]}.*'first.weight'"):
        trained(Means(fault), at)


@pytest.mark.parametrize(
    ("at", "transform"),
    [(at, transform) for at in TENSOR for transform in (Mean(), Mean(view=True))]
    + [(at, Means()) for at in GROUP],
    ids=repr,
)
def test_p08_a_returned_state_is_not_modified_through_the_gradient(
    at: Selector, transform: Transform
) -> None:
    zeroed, fresh = (trained(transform, at, to_none) for to_none in (False, True))
    torch.testing.assert_close(zeroed, fresh, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
@pytest.mark.parametrize("at", TENSOR, ids=repr)
def test_p09_a_tensor_kept_by_a_function_is_not_modified_through_the_gradient(at: Selector) -> None:
    (model, results) = small(), list[Tensor]()

    def keeping(grad: Tensor) -> Tensor:
        results.append(grad * 2.0)
        return results[-1]

    optimizer = sgd(model)
    with gs.Surgery(gs.Intervention(keeping, at=at)).attach(model, optimizer):
        train(model, optimizer, 1)
        before = [grad.clone() for grad in results]
        optimizer.zero_grad(set_to_none=False)
    assert len(results) == 4
    torch.testing.assert_close(results, before, rtol=0, atol=0)


def _captured(model: nn.Module) -> Tensor:
    return torch.autograd.grad(model(batch()[0]).sum(), [model.first.bias])[0]


@pytest.mark.parametrize(
    ("at", "result"),
    [
        (gs.Captured("first.bias"), _captured),
        (gs.Activations("last"), lambda model: model(batch()[0]).detach()),
    ],
    ids=["captured", "activations"],
)
def test_p08_captured_gradients_and_activations_do_not_share_a_transforms_state(
    at: Selector, result: Callable[[nn.Module], Tensor]
) -> None:
    model, seen = small(), []
    with attached(model, Mean(), at):
        for _ in range(2):
            tensor = result(model)
            seen.append(tensor.clone())
            tensor.zero_()
    torch.testing.assert_close(seen[1], 1.9 * seen[0])
