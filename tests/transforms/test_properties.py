"""Every property that a transform declares holds, and a false declaration is caught."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from gradsurg.testing import check_transform
from gradsurg.testing.transforms import PROPERTY_CHECKS, SHAPES
from gradsurg.transforms.adaptive_clip import AdaptiveClip
from gradsurg.transforms.add_noise import AddNoise
from gradsurg.transforms.agc import AGC
from gradsurg.transforms.base import (
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from gradsurg.transforms.centralize import Centralize
from gradsurg.transforms.chain import Chain
from gradsurg.transforms.clamp import Clamp
from gradsurg.transforms.clip import Clip
from gradsurg.transforms.clip_global_norm import ClipGlobalNorm
from gradsurg.transforms.clip_norm import ClipNorm
from gradsurg.transforms.curve import Curve
from gradsurg.transforms.dgc import DGC
from gradsurg.transforms.direct_feedback import DirectFeedback
from gradsurg.transforms.error_feedback import ErrorFeedback
from gradsurg.transforms.feature_distance import FeatureDistance
from gradsurg.transforms.feedback_weights import FeedbackWeights
from gradsurg.transforms.gradient_reversal import GradientReversal
from gradsurg.transforms.graft import Graft
from gradsurg.transforms.grokfast_ema import GrokfastEMA
from gradsurg.transforms.grokfast_ma import GrokfastMA
from gradsurg.transforms.low_rank import LowRank
from gradsurg.transforms.mask import Mask
from gradsurg.transforms.momentum import Momentum
from gradsurg.transforms.n_of_m import NOfM
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.transforms.norm_rescale import NormRescale
from gradsurg.transforms.orthogonalize import Orthogonalize
from gradsurg.transforms.perpendicular import Perpendicular
from gradsurg.transforms.placebo import Placebo
from gradsurg.transforms.quantize import Quantize
from gradsurg.transforms.route import Route
from gradsurg.transforms.sanitize import Sanitize
from gradsurg.transforms.scale import Scale
from gradsurg.transforms.scale_by_sign import ScaleBySign
from gradsurg.transforms.scheduled import Scheduled
from gradsurg.transforms.sign import Sign
from gradsurg.transforms.sign_agreement import SignAgreement
from gradsurg.transforms.spike_clip import SpikeClip
from gradsurg.transforms.straight_through import StraightThrough
from gradsurg.transforms.surrogate_gradient import SurrogateGradient
from gradsurg.transforms.tgr import TGR
from gradsurg.transforms.trust_ratio import TrustRatio
from gradsurg.transforms.update_clip import UpdateClip
from tests.transforms.cases import INF, SHAPES_OF, build, names
from tests.transforms.table import README, row
from tests.verdict_tables import written

# Properties depend on fields: these instances cover the other branches of those conditions.
OTHERS = (
    AGC(0.5, per="tensor"),
    AGC(1e-5, eps=1e-4),
    AdaptiveClip("deviations", 0.5, warmup=1, max_norm=None),
    AdaptiveClip("zscore", 0.1, warmup=1, max_norm=0.5, of="each"),
    AdaptiveClip("ratio", 0.5, warmup=1),
    AddNoise(sigma=0.5),
    Centralize("tensor"),
    Clamp(low=-0.5, high=0.25),
    Clamp(low=0.1, high=0.2),
    Clamp(low=None, high=0.3),
    Clamp(low=None, high=-0.5),
    Clamp(low=0.0, high=None),
    ClipNorm(0.5, p=1.0, per="unit"),
    ClipNorm(0.5, per="entry", eps=0.1),
    ClipNorm(0.5, per="unit", mean=True),
    UpdateClip(0.5, max_rms=0.3),
    FeatureDistance(2.0, power=0.5),
    ClipGlobalNorm(0.5, p=INF),
    GrokfastEMA(0.5, -3.0),
    DirectFeedback(3.0),
    FeedbackWeights(3.0),
    StraightThrough(rescale=True),
    TGR(2.0),
    Mask(0.5, per="unit"),
    Mask(0.4, rescale=True),
    Mask(0.3, by="threshold"),
    Mask(0.3, by="random"),
    Mask(0.5, by="random_k"),
    Mask(0.5, by="random_k", rescale=True),
    Curve("softsign", 0.5),
    Curve("log", 0.5),
    Curve("power", 0.5),
    Momentum(0.5, nesterov=True),
    Momentum(0.5, average=True),
    NOfM(1, 3),
    NOfM(1, 2, axis=0),
    Orthogonalize(scale="rms"),
    Orthogonalize(scale="none"),
    Perpendicular(below=1.0, per="unit"),
    Perpendicular(per="unit"),
    Perpendicular(rescale=True, below=1.0),
    DGC(0.5, 0.5),
    Graft(Clip(0.5), Scale(0.5)),
    Graft(ClipGlobalNorm(0.5), GrokfastEMA()),
    GrokfastMA(2),
    LowRank(1),
    Quantize(3, stochastic=False),
    Quantize(3, by="norm", per="unit"),
    Quantize(2, clip=1.0, stochastic=False),
    SignAgreement(0.5, rescale=True),
    SpikeClip(1.5, decay=0.5, warmup=1),
    TrustRatio(eps=0.1, per="unit"),
    TrustRatio(per="unit"),
    NormRescale(2.0, p=1.0, per="unit"),
    NormRescale(0.1, p=INF, eps=0.5),
    NormRescale(2.0, per="entry"),
    GradientReversal(3.0),
    Sanitize("clamp"),
    Sanitize("drop"),
    Scale(-2.0),
    Scale(0.0),
    Scale(1.0),
    Scale(10.0),
    ScaleBySign(2.0, -1.0),
    ScaleBySign(0.5, 0.5),
    ScaleBySign(-1.0, -1.0),
    ScaleBySign(2.0, 0.5, per="unit"),
    ScaleBySign(2.0, 2.0, per="tensor"),
    ScaleBySign(1.0, 0.0, per="tensor"),
    ScaleBySign(2.0, 0.0, of="value"),
    ScaleBySign(1.0, 0.0, of="value", per="unit"),
    Sign("mean"),
    Sign("mean", per="unit"),
    SurrogateGradient("sigmoid", 5.0),
    SurrogateGradient("arctan", 3.0),
    SurrogateGradient("triangle", 0.5, center=0.5),
    Chain(),
    Chain(Clip(0.5)),
    Chain(Scale(2.0), Clip(0.5)),
    Chain(Mask(0.5), NormRescale()),
    Chain(GradientReversal(), Centralize(), Scale(0.5)),
    Chain(AddNoise(sigma=0.1), Mask(0.5, by="random", rescale=True)),
    Chain(ScaleBySign(), Scale(3.0)),
    Scheduled(Clip(0.5), curve="cosine"),
    Scheduled(GradientReversal(), start=0.5, stop=1.0, curve="saturating"),
    Scheduled(Scale(0.5), start=-1.0, stop=3.0),
    Scheduled(Mask(0.5, by="random", rescale=True)),
    Scheduled(ClipGlobalNorm(0.5)),
    ErrorFeedback(Mask(0.5)),
    ErrorFeedback(Mask(0.5, by="random")),
    ErrorFeedback(GrokfastEMA()),
    ErrorFeedback(ClipGlobalNorm(0.5)),
    Chain(FeedbackWeights(), Scale(2.0)),
    NormMatched(GradientReversal()),
    Placebo(ScaleBySign(-1.0, 0.5)),
    Placebo(Chain(AddNoise(0.1), ClipGlobalNorm(0.5))),
    NormMatched(NormRescale()),
    NormMatched(ScaleBySign()),
    NormMatched(Chain(Scale(2.0), ClipGlobalNorm(0.5))),
)
ALL = (*(build(name) for name in names()), *OTHERS)


@pytest.mark.parametrize("name", names())
def test_every_declared_property_holds_and_the_documented_row_agrees(name: str) -> None:
    assert row(name) in written(README), "python -m tests.transforms.table writes it anew"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("transform", OTHERS, ids=str)
def test_every_declared_property_holds_with_other_fields(transform: Transform) -> None:
    check_transform(transform, drops_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("transform", ALL, ids=str)
def test_every_declared_property_holds_in_many_more_cases(transform: Transform) -> None:
    shapes = SHAPES if not isinstance(transform, Route) else SHAPES_OF["route"]
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
