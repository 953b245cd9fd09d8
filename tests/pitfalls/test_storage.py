"""Pitfalls of shared memory, at every gradient, for users' transforms and built-in ones."""

import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsurg as gs
from gradsurg.hooks.transform_hook import is_trusted
from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Selector
from gradsurg.transforms.base import (
    GroupTransform,
    Need,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from tests.nets import backward, batch, sgd, small, weights

STAGES: dict[str, Selector] = {stage: gs.Parameters(stage=stage) for stage in gs.Parameters.stages}
everywhere = pytest.mark.parametrize("at", STAGES.values(), ids=STAGES.keys())


def steps(
    model: nn.Module, optimizer: Optimizer, count: int = 3, *, to_none: bool = True
) -> Iterator[int]:
    """Train and yield the step."""
    for step in range(count):
        yield step
        optimizer.zero_grad(set_to_none=to_none)
        backward(model, step)
        optimizer.step()


def surgery(function: Callable[[Tensor], Tensor], at: Selector) -> gs.Surgery:
    with pytest.warns(gs.SurgeryWarning, match="plain callable"):
        return gs.Surgery(gs.Intervention(function, at=at))


@everywhere
def test_p06_in_place_modification_is_refused_at_every_gradient(at: Selector) -> None:
    model = small()
    optimizer, now = sgd(model), [0]

    def at_first_not(grad: Tensor) -> Tensor:
        # The last of the backward: by then the first gradients of the step have shown no fault.
        late = now[0] == 2 and grad.shape == model.first.weight.shape
        return grad.mul_(2.0) if late else grad * 1.0

    with (
        pytest.raises(RuntimeError, match="changed the gradient in place at site 'first.weight'"),
        surgery(at_first_not, at).attach(model, optimizer),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        for now[0] in steps(model, optimizer):
            pass


@everywhere
def test_p08_sharing_the_parameters_storage_is_refused_at_every_gradient(
    at: Selector,
) -> None:
    model = small()
    optimizer, now = sgd(model), [0]

    def at_first_not(grad: Tensor) -> Tensor:
        late = now[0] == 2 and grad.shape == model.first.weight.shape
        return model.first.weight.detach() if late else grad * 1.0

    with (
        pytest.raises(RuntimeError, match="returned the storage of the value at site 'first.wei"),
        surgery(at_first_not, at).attach(model, optimizer),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        for now[0] in steps(model, optimizer):
            pass


@validated
class Mean(Transform):
    """A running mean that is both result and state, as users would write it."""

    view: bool = False

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"elementwise", "deterministic", "linear", "idempotent"})

    def init(self, grad: Tensor) -> TransformState:
        return {"mean": torch.zeros_like(grad)}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        mean = 0.9 * state["mean"] + grad
        return mean.view_as(mean) if self.view else mean, {"mean": mean}


@validated
class Means(GroupTransform):
    """The same for a group."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return Mean().properties

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {str(index): torch.zeros_like(grad) for index, grad in enumerate(grads)}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        means = [0.9 * state[str(index)] + grad for index, grad in enumerate(grads)]
        return means, {str(index): mean for index, mean in enumerate(means)}


def trained(make: Callable[[], gs.Surgery], *, to_none: bool) -> list[Tensor]:
    """Return the weights after some steps, with gradients set to None or zeroed in between."""
    model = small()
    optimizer = sgd(model)
    with make().attach(model, optimizer):
        for _ in steps(model, optimizer, to_none=to_none):
            pass
    return weights(model)


@pytest.mark.parametrize("transform", [Mean(), Mean(view=True)], ids=repr)
@everywhere
def test_p08_a_returned_state_is_not_modified_through_the_gradient(
    at: Selector, transform: Transform
) -> None:
    def make() -> gs.Surgery:
        return gs.Surgery(gs.Intervention(transform, at=at))

    torch.testing.assert_close(
        trained(make, to_none=False), trained(make, to_none=True), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "at", [gs.Parameters(stage="step"), gs.Parameters(stage="backward_end")], ids=["step", "end"]
)
def test_p08_a_returned_state_of_a_group_is_not_modified_through_the_gradients(
    at: Selector,
) -> None:
    def make() -> gs.Surgery:
        return gs.Surgery(gs.Intervention(Means(), at=at))

    torch.testing.assert_close(
        trained(make, to_none=False), trained(make, to_none=True), rtol=0, atol=0
    )


@everywhere
def test_p09_a_tensor_kept_by_a_function_is_not_modified_through_the_gradient(at: Selector) -> None:
    results: list[Tensor] = []

    def keeping(grad: Tensor) -> Tensor:
        results.append(grad * 2.0)
        return results[-1]

    model = small()
    optimizer = sgd(model)
    with surgery(keeping, at).attach(model, optimizer):
        backward(model)
        optimizer.step()
        before = [grad.clone() for grad in results]
        optimizer.zero_grad(set_to_none=False)
    assert len(results) == 4
    torch.testing.assert_close(results, before, rtol=0, atol=0)


@validated
class Later(GroupTransform):
    """A group transform that violates a rule after its first gradients."""

    fault: str

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear", "idempotent"})

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"value"})

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        values = [context.value for context in contexts]
        if contexts[0].step == 0:
            return [grad * 1.0 for grad in grads], state
        match self.fault:
            case "in place":
                return [grad.mul_(2.0) for grad in grads], state
            case "value":
                return [value.detach() for value in values if value is not None], state
            case _:
                raise AssertionError(self.fault)


@pytest.mark.parametrize(
    "at", [gs.Parameters(stage="step"), gs.Parameters(stage="backward_end")], ids=["step", "end"]
)
@pytest.mark.parametrize(
    ("fault", "message"),
    [("in place", "changed the gradient in place"), ("value", "returned the storage of the value")],
)
def test_p08_a_group_is_checked_at_every_backward(fault: str, message: str, at: Selector) -> None:
    model = small()
    optimizer = sgd(model)
    steps_done = []
    with (
        pytest.raises(RuntimeError, match=f"{message}.*'first.weight'"),
        gs.Surgery(gs.Intervention(Later(fault), at=at)).attach(model, optimizer),
    ):
        for step in steps(model, optimizer):
            steps_done.append(step)
    assert steps_done == [0, 1]


def test_p08_captured_gradients_and_activations_do_not_share_a_transforms_state() -> None:
    model, captured, seen = small(), [], []
    with gs.Surgery(gs.Intervention(Mean(), at=gs.Captured("first.bias"))).attach(model):
        for _ in range(2):
            (grad,) = torch.autograd.grad(model(batch()[0]).sum(), [model.first.bias])
            captured.append(grad.clone())
            grad.zero_()
    torch.testing.assert_close(captured[1], 1.9 * captured[0])
    with gs.Surgery(gs.Intervention(Mean(), at=gs.Activations("last"))).attach(model):
        for _ in range(2):
            out = model(batch()[0])
            seen.append(out.detach().clone())
            out.detach().zero_()
    torch.testing.assert_close(seen[1], 1.9 * seen[0])


def test_a_wrapper_of_a_users_transform_is_checked_like_it() -> None:
    with pytest.warns(gs.SurgeryWarning, match="plain callable"):
        surgery = gs.Surgery(gs.Intervention(gs.Chain(gs.Scale(2.0), torch.neg)))
    (item,) = surgery.interventions
    assert [is_trusted(link) for link in item.links] == [True, False]
    for transform in (Mean(), gs.Scheduled(Mean()), gs.NormMatched(gs.Chain(gs.Clip(), Mean()))):
        assert not is_trusted(transform)
