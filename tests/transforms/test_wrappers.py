"""Chain, Scheduled, ErrorFeedback, NormMatched and plain functions as transforms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.transforms.base import (
    Function,
    Transform,
    TransformContext,
    init_all,
    update_all,
)
from tests.transforms.cases import INF, NAN

GRADS = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
CONTEXTS = [TransformContext("a"), TransformContext("b")]


def act(transform: Transform, grad: Tensor, step: int = 0) -> Tensor:
    return transform.update(grad, transform.init(grad), TransformContext("a.weight", step))[0]


def test_a_chain_runs_its_links_in_order() -> None:
    grad = torch.tensor([5.0])
    assert act(gs.Chain(gs.Clip(1.0), gs.Scale(2.0)), grad).item() == 2.0
    assert act(gs.Chain(gs.Scale(2.0), gs.Clip(1.0)), grad).item() == 1.0


def test_a_chain_of_chains_is_one_chain() -> None:
    flat = gs.Chain(gs.Clip(1.0), gs.Scale(2.0), gs.Zero())
    nested = gs.Chain(gs.Clip(1.0), gs.Chain(gs.Chain(gs.Scale(2.0)), gs.Zero()))
    assert nested == flat
    assert hash(nested) == hash(flat)
    assert nested.links == (gs.Clip(1.0), gs.Scale(2.0), gs.Zero())
    assert repr(flat) == "Chain(Clip(value=1.0), Scale(factor=2.0), Zero())"
    assert gs.Chain(links=[gs.Clip(1.0), gs.Scale(2.0), gs.Zero()]) == flat
    assert gs.Chain(gs.Zero(), gs.Clip(1.0)) != gs.Chain(gs.Clip(1.0), gs.Zero())


def test_a_chain_refuses_objects_that_are_not_transforms() -> None:
    wrong: list[Any] = [gs.Zero(), 3]
    forgotten: Any = gs.Zero
    with pytest.raises(TypeError, match=r"Chain\.links\.1: must be a transform, found 3"):
        gs.Chain(*wrong)
    with pytest.raises(TypeError, match=r"did you mean Zero\(\)\?"):
        gs.Chain(forgotten)


def test_a_chain_with_a_plain_function_has_no_properties() -> None:
    chain = gs.Chain(gs.Scale(2.0), torch.neg)
    assert isinstance(chain.links[1], Function)
    assert chain.properties == frozenset()
    assert act(chain, torch.tensor([1.0])).item() == -2.0


def test_equal_links_draw_different_noise() -> None:
    grad = torch.zeros(1000)
    one = act(gs.Chain(gs.AddNoise(sigma=1.0)), grad)
    two = act(gs.Chain(gs.AddNoise(sigma=1.0), gs.AddNoise(sigma=1.0)), grad)
    # Of independent draws the variances add up; of equal ones the sum would have four times it.
    assert 1.7 < (two.var() / one.var()).item() < 2.3


def test_each_link_of_a_chain_has_its_own_state() -> None:
    chain = gs.Chain(gs.GrokfastEMA(0.5, 1.0), gs.Scale(10.0), gs.GrokfastEMA(0.5, 1.0))
    grads = [torch.tensor([1.0]), torch.tensor([3.0])]
    state = chain.init(grads[0])
    assert sorted(state) == ["0.0.mean", "0.0.started", "2.0.mean", "2.0.started"]
    first, second = gs.GrokfastEMA(0.5, 1.0), gs.GrokfastEMA(0.5, 1.0)
    states = [first.init(grads[0]), second.init(grads[0])]
    for grad in grads:
        result, state = chain.update(grad, state, TransformContext())
        middle, states[0] = first.update(grad, states[0], TransformContext())
        expected, states[1] = second.update(10 * middle, states[1], TransformContext())
        torch.testing.assert_close(result, expected)


def test_a_chain_has_group_scope_if_a_link_has() -> None:
    assert gs.Chain(gs.Clip(1.0), gs.Zero()).scope == "tensor"
    chain = gs.Chain(gs.Scale(2.0), gs.ClipGlobalNorm(1.0, eps=0.0), gs.GrokfastEMA())
    assert chain.scope == "group"
    made, state = update_all(chain, GRADS, init_all(chain, GRADS), CONTEXTS)
    results = list(made)
    # |(6, 8)| = 10, so [0.6, 0] and [0.8]; three times that at the first step of GrokfastEMA.
    torch.testing.assert_close(results[0], torch.tensor([1.8, 0.0]))
    torch.testing.assert_close(results[1], torch.tensor([[2.4]]))
    assert {key for key in state if key.endswith("mean")} == {"2.0.mean", "2.1.mean"}


@pytest.mark.parametrize("wrap", [gs.Chain, gs.Scheduled, gs.NormMatched, gs.ErrorFeedback])
def test_a_wrapper_has_the_needs_and_scope_of_the_wrapped_transform(
    wrap: Callable[[Any], Transform],
) -> None:
    assert wrap(gs.ScaleBySign(of="value")).needs == {"value"}
    assert not wrap(gs.Zero()).needs
    assert wrap(gs.ClipGlobalNorm()).scope == "group"
    assert wrap(gs.Zero()).scope == "tensor"
    assert wrap(torch.neg).properties <= {"sign_preserving"}


def test_a_chain_of_two_links_does_not_declare_idempotence() -> None:
    assert "idempotent" in gs.Chain(gs.Sign()).properties
    assert "idempotent" not in gs.Chain(gs.Sign(), gs.Clip(0.5)).properties


@pytest.mark.parametrize(
    ("curve", "middle"),
    [("linear", 0.25), ("cosine", 0.1464466), ("saturating", 2 / (1 + math.exp(-2.5)) - 1)],
)
def test_a_schedule_follows_its_curve_between_two_constants(curve: str, middle: float) -> None:
    fields: dict[str, Any] = {"begin": 10, "steps": 8, "start": 1.0, "stop": 3.0, "curve": curve}
    scheduled = gs.Scheduled(gs.Zero(), **fields)
    assert [scheduled.strength(step) for step in (0, 10, 18, 1000)] == [1.0, 1.0, 3.0, 3.0]
    assert math.isclose(scheduled.strength(12), 1 + 2 * middle, rel_tol=1e-6)


def test_a_schedule_is_exact_at_both_ends() -> None:
    grad = torch.tensor([0.1, 1e-30, INF, NAN])
    scheduled = gs.Scheduled(gs.Scale(3e38), steps=10)
    assert act(scheduled, grad, step=0) is grad
    full = act(scheduled, grad, step=10)
    assert torch.equal(full[:3], act(gs.Scale(3e38), grad)[:3])


def test_a_schedule_advances_the_state_while_its_strength_is_zero() -> None:
    scheduled = gs.Scheduled(gs.GrokfastEMA(0.5, 1.0), begin=1, steps=1)
    state = scheduled.init(torch.zeros(1))
    _, state = scheduled.update(torch.tensor([2.0]), state, TransformContext(step=0))
    result, _ = scheduled.update(torch.tensor([4.0]), state, TransformContext(step=2))
    assert result.item() == 4.0 + (0.5 * 2.0 + 0.5 * 4.0)


def test_a_scheduled_gradient_reversal_has_the_papers_lambda() -> None:
    scheduled = gs.Scheduled(
        gs.GradientReversal(), start=0.5, stop=1.0, curve="saturating", steps=100
    )
    for step in (0, 1, 30, 99):
        strength = 2 / (1 + math.exp(-10 * step / 100)) - 1
        result = act(scheduled, torch.tensor([1.0]), step=step).item()
        assert math.isclose(result, -strength, abs_tol=1e-6)


def test_a_schedule_of_a_group_transform() -> None:
    scheduled = gs.Scheduled(gs.ClipGlobalNorm(1.0, eps=0.0), start=0.5, stop=0.5)
    results = list(update_all(scheduled, GRADS, init_all(scheduled, GRADS), CONTEXTS)[0])
    torch.testing.assert_close(results[0], torch.tensor([1.8, 0.0]))
    torch.testing.assert_close(results[1], torch.tensor([[2.4]]))


def test_error_feedback_adds_the_error_to_the_next_gradient() -> None:
    feedback = gs.ErrorFeedback(gs.Mask(0.5))
    state = feedback.init(torch.zeros(2))
    first, state = feedback.update(torch.tensor([4.0, 3.0]), state, TransformContext(step=0))
    second, state = feedback.update(torch.tensor([1.0, 1.0]), state, TransformContext(step=1))
    third, state = feedback.update(torch.tensor([0.0, 0.0]), state, TransformContext(step=2))
    assert [first.tolist(), second.tolist(), third.tolist()] == [[4.0, 0.0], [0.0, 4.0], [1.0, 0.0]]
    assert state["error.0"].tolist() == [0.0, 0.0]


def test_error_feedback_includes_the_rounding_error() -> None:
    feedback, grad = gs.ErrorFeedback(gs.Scale(1.0)), torch.ones(1, dtype=torch.bfloat16)
    state = feedback.init(grad)
    state["error.0"] = torch.tensor([0.001])  # there is no 1.001 in bfloat16
    result, state = feedback.update(grad, state, TransformContext())
    assert result.dtype == torch.bfloat16
    assert result.item() == 1.0
    torch.testing.assert_close(state["error.0"], torch.tensor([0.001]), atol=1e-6, rtol=0)


def test_error_feedback_of_a_group_keeps_one_error_a_tensor_and_the_inner_state() -> None:
    feedback = gs.ErrorFeedback(gs.Chain(gs.ClipGlobalNorm(1.0, eps=0.0), gs.GrokfastEMA()))
    results, state = update_all(feedback, GRADS, init_all(feedback, GRADS), CONTEXTS)
    for index, (grad, result) in enumerate(zip(GRADS, results, strict=True)):
        torch.testing.assert_close(state[f"error.{index}"], grad - result)
    assert {key for key in state if key.endswith("mean")} == {"of.1.0.mean", "of.1.1.mean"}


def test_a_wrapper_refuses_objects_that_are_not_transforms() -> None:
    number: Any = 3
    forgotten: Any = gs.Zero
    with pytest.raises(FieldError, match=r"^Scheduled\.of: must be a Transform, found 3$"):
        gs.Scheduled(number)
    with pytest.raises(FieldError, match=r"^NormMatched\.of: must be a Transform, found"):
        gs.NormMatched(forgotten)


def test_norm_matched_has_the_transforms_norm_and_the_gradients_direction() -> None:
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for other in (gs.Clip(0.3), gs.Sign(), gs.Chain(gs.Scale(5.0), gs.ScaleBySign())):
        result = act(gs.NormMatched(other), grad)
        torch.testing.assert_close(result.norm(), act(other, grad).norm())
        torch.testing.assert_close(result / result.norm(), grad / grad.norm())


def test_norm_matched_of_a_group_matches_each_tensor() -> None:
    matched = gs.NormMatched(gs.ClipGlobalNorm(1.0, eps=0.0))
    results = list(update_all(matched, GRADS, init_all(matched, GRADS), CONTEXTS)[0])
    torch.testing.assert_close(results[0], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(results[1], torch.tensor([[0.8]]))


@pytest.mark.parametrize(
    "other",
    [
        gs.Sign(),
        gs.ScaleBySign(),
        gs.AddNoise(sigma=1.0),
        gs.Chain(gs.Scale(5.0), gs.ScaleBySign(-1.0, 0.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_placebo_has_the_transforms_norm_and_cosine_and_another_direction(
    other: Transform, dtype: torch.dtype
) -> None:
    grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=dtype)
    target, placebo = act(other, grad), act(gs.Placebo(other), grad)
    cosine = torch.nn.CosineSimilarity(dim=0)
    torch.testing.assert_close(placebo.norm(), target.norm())
    angle = cosine(grad.flatten(), target.flatten())
    torch.testing.assert_close(cosine(grad.flatten(), placebo.flatten()), angle)
    # Two directions orthogonal to g are nearly orthogonal to each other.
    along = grad.flatten() / grad.norm()
    ways = [way.flatten() - (way.flatten() @ along) * along for way in (target, placebo)]
    assert abs(cosine(*ways)) < 0.15


def test_the_placebo_of_a_transform_that_changes_nothing_is_the_gradient_bit_for_bit() -> None:
    grad = torch.tensor([0.1, -0.0, 1e-30, -3.0, 1e30])
    assert same_bits(act(gs.Placebo(gs.Scale(1.0)), grad), grad)
    assert same_bits(act(gs.Placebo(gs.Clip(1e31)), grad), grad)


def test_a_placebo_draws_anew_at_each_step_site_and_call_and_never_from_the_global_generator() -> (
    None
):
    grad, placebo = torch.arange(-5.0, 5.0), gs.Placebo(gs.ScaleBySign())
    contexts = [
        TransformContext("a", 1),
        TransformContext("a", 2),
        TransformContext("b", 1),
        TransformContext("a", 1, seed=1),
        TransformContext("a", 1, call=1),
    ]
    before = torch.get_rng_state()
    results = [placebo.update(grad, {}, context)[0] for context in contexts]
    assert len({tuple(result.tolist()) for result in results}) == len(contexts)
    again, _ = placebo.update(grad, {}, TransformContext("a", 1))
    assert torch.equal(again, results[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_placebo_of_zero_has_the_transforms_norm_and_one_of_one_entry_is_the_transform() -> None:
    zeros = torch.zeros(5)
    noisy = act(gs.AddNoise(sigma=1.0), zeros)
    torch.testing.assert_close(act(gs.Placebo(gs.AddNoise(sigma=1.0)), zeros).norm(), noisy.norm())
    torch.testing.assert_close(
        act(gs.Placebo(gs.Scale(-2.0)), torch.tensor([3.0])), torch.tensor([-6.0])
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
