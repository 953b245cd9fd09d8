"""Every property that a transform declares holds, and a false declaration is caught."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.testing import check_transform
from gradsurg.testing.transforms import PROPERTY_CHECKS, SHAPES
from gradsurg.transforms.base import (
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from tests.transforms.cases import INF, SHAPES_OF, build, names
from tests.transforms.table import README, row
from tests.verdict_tables import written

# Properties depend on fields: these instances cover the other branches of those conditions.
OTHERS = (
    gs.AGC(0.5, per="tensor"),
    gs.AGC(1e-5, eps=1e-4),
    gs.AdaptiveClip("deviations", 0.5, warmup=1, max_norm=None),
    gs.AdaptiveClip("zscore", 0.1, warmup=1, max_norm=0.5, of="each"),
    gs.AdaptiveClip("ratio", 0.5, warmup=1),
    gs.AdaptiveClip("zscore", 100.0, warmup=1, max_norm=None),
    gs.AddNoise(sigma=0.5),
    gs.Centralize("tensor"),
    gs.Clamp(low=-0.5, high=0.25),
    gs.Clamp(low=0.1, high=0.2),
    gs.Clamp(low=None, high=0.3),
    gs.Clamp(low=None, high=-0.5),
    gs.Clamp(low=0.0, high=None),
    gs.ClipNorm(0.5, p=1.0, per="unit"),
    gs.ClipNorm(0.5, per="entry", eps=0.1),
    gs.ClipNorm(0.5, per="unit", mean=True),
    gs.UpdateClip(0.5, max_rms=0.3),
    gs.FeatureDistance(2.0, power=0.5),
    gs.ClipGlobalNorm(0.5, p=INF),
    gs.RescaleGlobalNorm(2.0, eps=0.1),
    gs.GrokfastEMA(0.5, -3.0),
    gs.DirectFeedback(3.0),
    gs.FeedbackWeights(3.0),
    gs.StraightThrough(rescale=True),
    gs.TGR(2.0),
    gs.Mask(0.5, per="unit"),
    gs.Mask(0.4, rescale=True),
    gs.Mask(0.3, by="threshold"),
    gs.Mask(0.3, by="random"),
    gs.Mask(0.5, by="random_k"),
    gs.Mask(0.5, by="random_k", rescale=True),
    gs.Curve("softsign", 0.5),
    gs.Curve("log", 0.5),
    gs.Curve("power", 0.5),
    gs.Momentum(0.5, nesterov=True),
    gs.Momentum(0.5, average=True),
    gs.NOfM(1, 3),
    gs.NOfM(1, 2, axis=0),
    gs.Orthogonalize(scale="rms"),
    gs.Orthogonalize(scale="none"),
    gs.Perpendicular(below=1.0, per="unit"),
    gs.Perpendicular(per="unit"),
    gs.Perpendicular(rescale=True, below=1.0),
    gs.DGC(0.5, 0.5),
    gs.Graft(gs.Clip(0.5), gs.Scale(0.5)),
    gs.Graft(gs.ClipGlobalNorm(0.5), gs.GrokfastEMA()),
    gs.GrokfastMA(2),
    gs.LowRank(1),
    gs.Quantize(3, stochastic=False),
    gs.Quantize(3, by="norm", per="unit"),
    gs.Quantize(2, clip=1.0, stochastic=False),
    gs.SignAgreement(0.5, rescale=True),
    gs.SpikeClip(1.5, decay=0.5, warmup=1),
    gs.TrustRatio(eps=0.1, per="unit"),
    gs.TrustRatio(per="unit"),
    gs.NormRescale(2.0, p=1.0, per="unit"),
    gs.NormRescale(0.1, p=INF, eps=0.5),
    gs.NormRescale(2.0, per="entry"),
    gs.GradientReversal(3.0),
    gs.Sanitize("clamp"),
    gs.Sanitize("drop"),
    gs.Scale(-2.0),
    gs.Scale(0.0),
    gs.Scale(1.0),
    gs.Scale(10.0),
    gs.ScaleBySign(2.0, -1.0),
    gs.ScaleBySign(0.5, 0.5),
    gs.ScaleBySign(-1.0, -1.0),
    gs.ScaleBySign(2.0, 0.5, per="unit"),
    gs.ScaleBySign(2.0, 2.0, per="tensor"),
    gs.ScaleBySign(1.0, 0.0, per="tensor"),
    gs.ScaleBySign(2.0, 0.0, of="value"),
    gs.ScaleBySign(1.0, 0.0, of="value", per="unit"),
    gs.Sign("mean"),
    gs.Sign("mean", per="unit"),
    gs.SurrogateGradient("sigmoid", 5.0),
    gs.SurrogateGradient("arctan", 3.0),
    gs.SurrogateGradient("triangle", 0.5, center=0.5),
    gs.Chain(),
    gs.Chain(gs.Clip(0.5)),
    gs.Chain(gs.Scale(2.0), gs.Clip(0.5)),
    gs.Chain(gs.Mask(0.5), gs.NormRescale()),
    gs.Chain(gs.GradientReversal(), gs.Centralize(), gs.Scale(0.5)),
    gs.Chain(gs.AddNoise(sigma=0.1), gs.Mask(0.5, by="random", rescale=True)),
    gs.Chain(gs.ScaleBySign(), gs.Scale(3.0)),
    gs.Scheduled(gs.Clip(0.5), curve="cosine"),
    gs.Scheduled(gs.GradientReversal(), start=0.5, stop=1.0, curve="saturating"),
    gs.Scheduled(gs.Scale(0.5), start=-1.0, stop=3.0),
    gs.Scheduled(gs.Mask(0.5, by="random", rescale=True)),
    gs.Scheduled(gs.ClipGlobalNorm(0.5)),
    gs.ErrorFeedback(gs.Mask(0.5)),
    gs.ErrorFeedback(gs.Mask(0.5, by="random")),
    gs.ErrorFeedback(gs.GrokfastEMA()),
    gs.ErrorFeedback(gs.ClipGlobalNorm(0.5)),
    gs.Chain(gs.FeedbackWeights(), gs.Scale(2.0)),
    gs.NormMatched(gs.GradientReversal()),
    gs.Placebo(gs.ScaleBySign(-1.0, 0.5)),
    gs.Placebo(gs.Chain(gs.AddNoise(0.1), gs.ClipGlobalNorm(0.5))),
    gs.NormMatched(gs.NormRescale()),
    gs.NormMatched(gs.ScaleBySign()),
    gs.NormMatched(gs.Chain(gs.Scale(2.0), gs.ClipGlobalNorm(0.5))),
)
ALL = (*(build(name) for name in names()), *OTHERS)


@pytest.mark.parametrize("name", names())
def test_every_config_keeps_the_rules_and_the_documented_row_agrees(name: str) -> None:
    assert row(name) in written(README), "python -m tests.transforms.table writes it anew"


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("transform", OTHERS, ids=str)
def test_every_declared_property_holds_with_other_fields(transform: Transform) -> None:
    check_transform(transform, drops_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("transform", ALL, ids=str)
def test_every_declared_property_holds_in_many_more_cases(transform: Transform) -> None:
    shapes = {type(build(name)): own for name, own in SHAPES_OF.items()}.get(
        type(transform), SHAPES
    )
    check_transform(transform, shapes=shapes, drops_nan=True, count=120)


def test_every_property_has_its_check() -> None:
    assert set(PROPERTY_CHECKS) == set(get_args(TransformProperty))


class Liar(Stateless):
    """Declares one property that it does not have."""

    def __init__(
        self, declared: TransformProperty, breaks: Callable[[Tensor, TransformContext], Tensor]
    ) -> None:
        self.declared: TransformProperty = declared
        self.breaks = breaks

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({self.declared})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return self.breaks(grad, context)


def drawn(grad: Tensor, context: TransformContext) -> Tensor:
    return grad * torch.rand((), generator=context.generator(grad.device), dtype=grad.dtype)


LIARS = (
    Liar("elementwise", lambda grad, _: grad.cumsum(0) if grad.ndim else grad),
    Liar("homogeneous", lambda grad, _: grad.clamp(-0.1, 0.1)),
    Liar("idempotent", lambda grad, _: grad / 2),
    Liar("linear", lambda grad, _: grad.abs()),
    Liar("odd", lambda grad, _: grad.clamp(min=-0.1)),
    Liar("sign_preserving", lambda grad, _: grad - grad.mean()),
    Liar("norm_non_increasing", lambda grad, _: grad * 1.001),
    Liar("unbiased", drawn),
    Liar("deterministic", drawn),
    Liar("differentiable", lambda grad, _: grad * grad.detach().abs()),
)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.declared)
def test_a_declared_property_that_does_not_hold_is_caught(liar: Liar) -> None:
    with pytest.raises(AssertionError, match=f"\n  {liar.declared}: "):
        check_transform(liar)


def test_every_property_has_a_false_declaration_here() -> None:
    assert {liar.declared for liar in LIARS} == set(PROPERTY_CHECKS)


class Difference(Transform):
    """Linear in the sequence of gradients, but not in one of them."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear"})

    def init(self, grad: Tensor) -> TransformState:
        return {"last": torch.zeros_like(grad)}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        return grad - state["last"], {"last": grad.clone()}


def test_properties_are_checked_with_the_state_after_a_gradient() -> None:
    with pytest.raises(AssertionError, match="\n  linear: "):
        check_transform(Difference())
