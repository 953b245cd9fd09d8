"""The wrapper around every transform: what passes, what is refused, and with which words."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import (
    GroupTransform,
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from tests.nets import attached, backward, grad_of, gradients, sgd, small, train, trainee

Wrong = Callable[[Tensor], Any]  # Any: what no transform may return


class Later(Stateless):
    """Does wrong from the given step on, at one site."""

    def __init__(self, wrong: Wrong, first: int, site: str = "") -> None:
        self.wrong, self.first, self.site = wrong, first, site

    def __repr__(self) -> str:
        return "Later()"

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        wrong = context.step >= self.first and context.site.endswith(self.site)
        return self.wrong(grad) if wrong else grad


class OfGroup(GroupTransform):
    """A group transform without state."""

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}


class LaterGroup(OfGroup):
    """As `Later`, for all gradients of a group."""

    def __init__(self, wrong: Wrong, first: int) -> None:
        self.wrong, self.first = wrong, first

    def __repr__(self) -> str:
        return "LaterGroup()"

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        wrong = self.wrong if contexts[0].step >= self.first else torch.clone
        return [wrong(grad) for grad in grads], state


def _acted(transform: Transform, at: Selector | None) -> None:
    """Train three steps with it."""
    model, optimizer = trainee()
    with attached(model, transform, at, optimizer):
        train(model, optimizer, 3)


WRONG = [
    (lambda grad: grad[:1], "found [1, "),
    (lambda grad: grad.double(), "torch.float64"),
    (lambda grad: None, "found NoneType"),
    (lambda grad: 1.0, "found float"),
    (lambda grad: grad.numpy(), "found ndarray"),
]

at_once_or_later = pytest.mark.parametrize("first", [0, 2])


@at_once_or_later
@pytest.mark.parametrize(("wrong", "described"), WRONG)
def test_a_result_unlike_the_gradient_is_refused_with_site_and_transform(
    wrong: Wrong, described: str, first: int
) -> None:
    # At a site that is not the first to get a gradient, for there the short way is open.
    with pytest.raises(TypeError, match=re.escape(described)) as caught:
        _acted(Later(wrong, first, "first.weight"), gs.Parameters())
    assert f"'first.weight', step {first}" in str(caught.value)
    assert "later: Later() must return a tensor like the gradient" in str(caught.value)


@at_once_or_later
@pytest.mark.parametrize("wrong", [wrong for wrong, _ in WRONG[:3]])
def test_a_group_result_unlike_the_gradient_is_refused(wrong: Wrong, first: int) -> None:
    text = "LaterGroup.. must return a tensor like the gradient"
    with pytest.raises(TypeError, match=text):
        _acted(LaterGroup(wrong, first), None)


class Mishap(Exception):
    """An exception that no library could know."""


def _raise(grad: Tensor) -> None:
    raise Mishap("mine")


def test_an_exception_inside_a_group_transform_tells_the_step() -> None:
    with pytest.raises(Mishap) as caught:
        _acted(LaterGroup(_raise, 1), None)
    assert caught.value.__notes__ == ["while later_group acted on 4 sites, step 1"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda later: gs.Chain(gs.Clip(), later),
        gs.Scheduled,
        lambda later: gs.NormMatched(gs.Chain(later, gs.Clip())),
    ],
)
def test_a_wrapper_of_a_users_transform_is_checked_like_it(wrapped: Any) -> None:
    with pytest.raises(RuntimeError, match="in place"):
        _acted(wrapped(Later(lambda grad: grad.mul_(2.0), 2)), gs.Parameters("first.weight"))


def test_a_link_of_a_chain_is_the_one_named() -> None:
    chain = gs.Chain(gs.Identity(), Later(lambda grad: grad[0], 0))
    with pytest.raises(TypeError, match=r"^later: Later"):
        _acted(chain, gs.Parameters("first.weight"))


# None


class Two(nn.Module):
    """Two outputs of one node, of which one is used; two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.unused = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: object = None) -> Tensor:
        left, _ = self.used(x).unbind(dim=0)[:2]
        return left


def test_missing_gradients_of_a_node_pass() -> None:
    plain, model = Two(), Two()
    model.load_state_dict(plain.state_dict())
    x = torch.ones(2, 6)
    plain(x).sum().backward()
    with attached(model, gs.Scale(2.0), gs.Nodes("Unbind")) as live:
        model(x).sum().backward()
    calls = {entry.site: entry.calls for entry in live.ledger}
    assert calls == {"root#0/UnbindBackward[0].0": 1}
    torch.testing.assert_close(grad_of(model.used.weight), grad_of(plain.used.weight) * 2)


@pytest.mark.parametrize("transform", [gs.Scale(2.0), gs.ClipGlobalNorm(1e-3)], ids=repr)
def test_a_parameter_without_a_gradient_stays_without_at_stage_step(transform) -> None:
    model = Two()
    optimizer = sgd(model)
    with (
        pytest.warns(gs.SurgeryWarning, match=r"unused\.weight, unused\.bias$"),
        attached(model, transform, gs.Parameters(stage="step"), optimizer),
    ):
        model(torch.ones(2, 6)).sum().backward()
        before = gradients(model)
        optimizer.step()
    assert model.unused.weight.grad is None
    assert set(gradients(model)) == {"used.weight", "used.bias"}
    assert not torch.equal(gradients(model)["used.bias"], before["used.bias"])


def test_a_step_without_any_gradient_passes() -> None:
    model, optimizer = trainee()
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"),
        attached(model, gs.ClipGlobalNorm(), None, optimizer),
    ):
        optimizer.step()
    assert not gradients(model)


# Kinds of gradients


def test_complex_gradients_are_refused_by_name() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    text = r"site 'w'.*torch\.complex64"
    with pytest.raises(TypeError, match=text), attached(model, gs.Clip()):
        model["w"].abs().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_gradient_keeps_its_dtype(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    with attached(model, gs.NormRescale(2.0)):
        model(torch.ones(4, 6, dtype=dtype)).sum().backward()
    weight = model.last.weight
    assert grad_of(weight).dtype is dtype
    assert grad_of(weight).double().norm().item() == pytest.approx(2.0, rel=1e-2)


class Product(Stateless):
    """Multiplies matrices, which autocast would do in half precision, and notes where."""

    def __init__(self) -> None:
        self.autocast: list[bool] = []

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return grad @ torch.eye(grad.shape[1], dtype=grad.dtype)


@pytest.mark.parametrize("stage", ["backward", "accumulated", "step"])
def test_autocast_is_off_inside_a_transform(stage) -> None:
    (model, optimizer), product = trainee(), Product()
    with (
        attached(model, product, gs.Parameters("*.weight", stage=stage), optimizer),
        torch.autocast("cpu", torch.bfloat16),
    ):
        for _ in range(3):
            train(model, optimizer, 1)
            assert torch.is_autocast_enabled("cpu")
    assert product.autocast == [False] * 6


def test_autocast_is_off_inside_a_transform_though_a_call_of_the_same_step_was_outside_it() -> None:
    (model, optimizer), product = trainee(), Product()
    with attached(model, product, gs.Activations("first"), optimizer, effects_every=0):
        for _ in range(2):
            backward(model)
            with torch.autocast("cpu", torch.bfloat16):
                backward(model)
            optimizer.step()
    assert product.autocast == [False] * 4


def test_a_state_that_is_loaded_is_taken_up_after_gradients_have_passed_the_short_way() -> None:
    model = nn.Linear(2, 1, bias=False)
    surgery = gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Parameters(stage="step")))
    fresh = gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Parameters(stage="step"))).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = []
    with surgery.attach(model, optimizer, effects_every=0):
        for _ in range(2):
            for factor in (1.0, 2.0, 3.0):
                optimizer.zero_grad()
                (factor * model(torch.ones(1, 2))).sum().backward()
                optimizer.step()
                grads.append(grad_of(model.weight).tolist())
            surgery.load_state_dict(fresh)
    assert grads[:3] == grads[3:]
    assert grads[0] != grads[1]


class GlobalDraws(gs.Trigger):
    """A user's trigger that draws from the global generator."""

    def fires(self, context: Any) -> bool:
        return bool(torch.rand(()) < 2)


def _numpy_noise(grad: Tensor) -> Tensor:
    return grad + float(np.random.standard_normal())


@pytest.mark.parametrize(
    ("transform", "when", "message"),
    [
        (lambda grad: grad + torch.randn_like(grad), gs.Always(), "context.generator"),
        (_numpy_noise, gs.Always(), "context.generator"),
        (gs.Chain(gs.Clip(1.0), nn.Dropout(0.5)), gs.Always(), "context.generator"),
        (gs.Clip(1.0), GlobalDraws(), "seeded by context.seed"),
    ],
    ids=["torch", "numpy", "a link", "a trigger"],
)
def test_user_code_that_draws_from_a_global_generator_is_refused_with_the_way_out(
    transform: Transform, when: gs.Trigger, message: str
) -> None:
    model, optimizer = trainee()
    with (
        pytest.raises(RuntimeError, match=f"drew from a global random generator.*{message}"),
        attached(model, transform, None, optimizer, when),
    ):
        backward(model)
