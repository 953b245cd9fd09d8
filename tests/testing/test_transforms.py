"""check_transform: counterexamples of properties and violations of rules."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.testing import check_transform
from gradsurg.testing.transforms import RULES
from gradsurg.transforms.base import (
    JointScaling,
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)


def halve(grad: Tensor) -> Tensor:
    return grad / 2


def test_a_plain_function_is_checked_and_its_properties_are_listed() -> None:
    table = check_transform(halve)
    assert table.name == "halve"
    assert table.holds == gs.Scale(0.5).properties
    assert "  linear                    holds, not declared" in str(table).splitlines()


def test_a_transform_that_changes_no_gradient_of_the_cases_is_not_tested() -> None:
    waits = check_transform(gs.GrokfastMA(1000), count=2)
    assert {one.name for one in waits.verdicts if one.tested} == gs.GrokfastMA().properties
    assert "  linear                    not tested" in str(waits).splitlines()
    assert all(one.tested for one in check_transform(halve, count=2).verdicts)


def test_a_property_that_does_not_hold_has_a_counterexample() -> None:
    table = check_transform(gs.Clip(0.5))
    assert table.holds == gs.Clip(0.5).properties
    (line,) = [line for line in str(table).splitlines() if "homogeneous" in line]
    assert line.split()[1] == "no"
    assert "times" in line
    with pytest.raises(AssertionError, match="\n  idempotent: g = .* twice: "):
        check_transform(halve, declared=["idempotent", "linear"])


def test_a_transform_that_reads_the_task_is_not_linear() -> None:
    class Picky(Own):
        @property
        def properties(self) -> frozenset[TransformProperty]:
            return frozenset({"deterministic", "linear"})

        def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
            return grad * 2 if context.task else grad

    with pytest.raises(AssertionError, match="\n  linear: g = .* of another task: "):
        check_transform(Picky())


def test_a_transform_of_a_group_that_is_the_identity_alone_has_its_properties_decided() -> None:
    assert all(one.tested for one in check_transform(ToMedian()).verdicts)
    with pytest.raises(AssertionError, match="\n  elementwise: g = .*\n  linear: g = .* 2 g - 3 h"):
        check_transform(ToMedian(), declared=["elementwise", "linear"])


@validated
class ToMedian(JointScaling):
    """Scale all gradients of a group by their median norm divided by the largest."""

    def joint_factor(self, grads: Sequence[Tensor]) -> Tensor:
        norms = torch.stack([grad.norm() for grad in grads])
        return (norms.median() / norms.max()).nan_to_num(1.0)


class Own(Stateless):
    """A transform that is equal to its copies."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return type(self).__name__

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Doubled(Own):
    """Deterministic and biased."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic", "unbiased"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * 2


def test_a_deterministic_transform_is_unbiased_only_if_it_returns_the_gradient() -> None:
    with pytest.raises(AssertionError, match="\n  unbiased: g = .* the mean over 1 seeds is "):
        check_transform(Doubled())
    assert "unbiased" in check_transform(gs.Identity()).holds


class Graph(Own):
    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        assert context.value is not None
        return grad * context.value


class Waiting(Own):
    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * (2 if grad.numel() and grad.max().item() > 0 else 1)


class Unequal(Waiting):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Batched(Own):
    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        if grad.device.type == "cpu" and grad.numel():
            return grad * (2 if grad.reshape(-1)[0] > 0 else 1)
        return grad


class Starting(Transform):
    """A transform whose first state is the gradient."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset()

    def init(self, grad: Tensor) -> TransformState:
        return {"first": grad.clone()}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        return grad.clone(), {"first": state["first"].clone()}


BREAK_RULES = {
    "pure": lambda grad: grad.mul_(2),
    "finite": lambda grad: grad * 1e10,
    "propagates_nan": lambda grad: grad.nan_to_num(),
    "initial_state": Starting(),
    "any_memory_layout": lambda grad: grad * (grad.stride(0) if grad.ndim > 1 else 1),
    "no_global_rng": lambda grad: grad * torch.rand_like(grad),
    "no_autograd_graph": Graph(),
    "no_synchronization": Waiting(),
    "value_semantics": Unequal(),
    "vmap": Batched(),
}


@pytest.mark.parametrize("name", BREAK_RULES)
def test_a_violated_rule_is_named(name: str) -> None:
    with pytest.raises(AssertionError, match=f"\n  {name}: "):
        check_transform(BREAK_RULES[name])


def test_every_rule_has_a_violation_here() -> None:
    assert set(BREAK_RULES) == set(RULES)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda grad: grad.double(), "pure: returns dtype torch.float64, expected torch.float32"),
        (lambda grad: grad.reshape(-1), r"pure: returns shape torch.Size\(\[1\]\), expected"),
        (lambda grad: grad.view_as(grad), "pure: the result shares memory with the gradient"),
        (lambda grad: None, "pure: returns NoneType, not a tensor"),
    ],
)
def test_a_result_must_be_like_the_gradient(breaks: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_transform(breaks)


def test_an_overflow_in_float16_alone_is_found() -> None:
    with pytest.raises(AssertionError, match="finite: torch.float16 of shape"):
        check_transform(lambda grad: grad * 100 / 100)


def test_only_the_given_shapes_are_tested() -> None:
    transform = gs.NormRescale(per="o i kh kw -> o")
    with pytest.raises(AssertionError, match="does not fit a tensor of 0 axes"):
        check_transform(transform)
    check_transform(transform, shapes=[(4, 3, 3, 3)])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a transform or a function, found 3"):
        check_transform(3)
    with pytest.raises(TypeError, match="takes a transform or a function, found <class"):
        check_transform(gs.Clip)
    with pytest.raises(ValueError, match="^declared: must be of elementwise, .* found square$"):
        check_transform(halve, declared=["square"])
