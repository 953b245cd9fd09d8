"""Every law a transform declares holds, and a law that does not hold is caught."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsurg.transforms.adaptive_clip import AdaptiveClip
from gradsurg.transforms.add_noise import AddNoise
from gradsurg.transforms.base import Context, Law, State, Stateless, Transform
from gradsurg.transforms.centralize import Centralize
from gradsurg.transforms.chain import Chain
from gradsurg.transforms.clamp import Clamp
from gradsurg.transforms.clip import Clip
from gradsurg.transforms.clip_global_norm import ClipGlobalNorm
from gradsurg.transforms.clip_norm import ClipNorm
from gradsurg.transforms.low_pass import LowPass
from gradsurg.transforms.mask import Mask
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.transforms.norm_rescale import NormRescale
from gradsurg.transforms.reverse import Reverse
from gradsurg.transforms.sanitize import Sanitize
from gradsurg.transforms.scale import Scale
from gradsurg.transforms.scale_by_sign import ScaleBySign
from gradsurg.transforms.scheduled import Scheduled
from gradsurg.transforms.sign import Sign
from tests.cases import INF, build, names

SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 2, 2))

# Laws depend on fields: these are the other sides of those conditions.
OTHERS = (
    AdaptiveClip(0.5, per="tensor"),
    AdaptiveClip(1e-5, eps=1e-4),
    AddNoise(sigma=0.5),
    Centralize("tensor"),
    Clamp(low=-0.5, high=0.25),
    Clamp(low=0.1, high=0.2),
    Clamp(low=None, high=0.3),
    Clamp(low=None, high=-0.5),
    Clamp(low=0.0, high=None),
    ClipNorm(0.5, p=1.0, per="unit"),
    ClipNorm(0.5, per="entry", eps=0.1),
    ClipGlobalNorm(0.5, p=INF),
    LowPass(0.5, -3.0),
    Mask(0.5, per="unit"),
    Mask(0.4, rescale=True),
    Mask(0.3, by="threshold"),
    Mask(0.3, by="random"),
    NormRescale(2.0, p=1.0, per="unit"),
    NormRescale(0.1, p=INF, eps=0.5),
    NormRescale(2.0, per="entry"),
    Reverse(3.0),
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
    Chain(),
    Chain(Clip(0.5)),
    Chain(Scale(2.0), Clip(0.5)),
    Chain(Mask(0.5), NormRescale()),
    Chain(Reverse(), Centralize(), Scale(0.5)),
    Chain(AddNoise(sigma=0.1), Mask(0.5, by="random", rescale=True)),
    Chain(ScaleBySign(), Scale(3.0)),
    Scheduled(Clip(0.5), curve="cosine"),
    Scheduled(Reverse(), start=0.5, stop=1.0, curve="saturating"),
    Scheduled(Scale(0.5), start=-1.0, stop=3.0),
    Scheduled(Mask(0.5, by="random", rescale=True)),
    Scheduled(ClipGlobalNorm(0.5)),
    NormMatched(Reverse()),
    NormMatched(NormRescale()),
    NormMatched(ScaleBySign()),
    NormMatched(Chain(Scale(2.0), ClipGlobalNorm(0.5))),
)
ALL = (*(build(name) for name in names()), *OTHERS)


@dataclass
class Draw:
    """What a law is checked on: two gradients, a past, a context."""

    g: Tensor
    h: Tensor
    past: Tensor
    context: Context

    def act(self, transform: Transform) -> Callable[[Tensor], Tensor]:
        """The transform as a function, with the state that one gradient has left behind."""
        _, state = transform.update(self.past, transform.init(self.past), self.context)
        return lambda grad: transform.update(grad, state, self.context)[0]


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Gradients of many scales, with zeros, equal entries and one sign in places."""
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def gradient() -> Tensor:
        plain = torch.randn(shape, generator=generator, dtype=torch.float64)
        plain = plain.abs() if draw(st.booleans()) else plain
        coarse = (plain * 2).round() / 2 if draw(st.booleans()) else plain
        return coarse * 10.0 ** draw(st.integers(-3, 2))

    step = draw(st.sampled_from([0, 1, 300, 1000, 5000]))
    return Draw(gradient(), gradient(), gradient(), Context("a.weight", step, gradient()))


def assert_elementwise(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    same = torch.arange(draw.g.numel()).reshape(draw.g.shape) % 2 == 0
    mixed = torch.where(same, draw.g, draw.h)
    assert_close(act(mixed)[same], act(draw.g)[same])


def assert_homogeneous(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    for factor in (0.125, 3.0, 2.0**16):
        assert_close(act(factor * draw.g), factor * act(draw.g))


def assert_idempotent(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    once = act(draw.g)
    assert_close(act(once), once)


def assert_linear(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    assert_close(act(2 * draw.g - 3 * draw.h), 2 * act(draw.g) - 3 * act(draw.h))


def assert_odd(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    assert_close(act(-draw.g), -act(draw.g))


def assert_sign_preserving(transform: Transform, draw: Draw) -> None:
    result = draw.act(transform)(draw.g)
    assert (result * draw.g >= 0).all()
    assert (result[draw.g == 0] == 0).all()


def assert_norm_non_increasing(transform: Transform, draw: Draw) -> None:
    assert draw.act(transform)(draw.g).norm() <= draw.g.norm() * (1 + 1e-12)


def assert_unbiased(transform: Transform, draw: Draw) -> None:
    state = transform.init(draw.g)
    contexts = [replace(draw.context, seed=seed) for seed in range(400)]
    results = torch.stack([transform.update(draw.g, state, one)[0] for one in contexts])
    mean = results.mean(dim=0)
    error = (results - mean).square().mean(dim=0).sqrt() / len(contexts) ** 0.5
    assert ((mean - draw.g).abs() <= 6 * error + 1e-9 * draw.g.abs()).all()


def assert_deterministic(transform: Transform, draw: Draw) -> None:
    results = [
        replace(draw, context=replace(draw.context, **change)).act(transform)(draw.g)
        for change in ({}, {"seed": 1}, {"site": "b.weight"}, {"call": 1})
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


Assertion = Callable[[Transform, Draw], None]
ASSERTIONS: dict[Law, Assertion] = {
    "elementwise": assert_elementwise,
    "homogeneous": assert_homogeneous,
    "idempotent": assert_idempotent,
    "linear": assert_linear,
    "odd": assert_odd,
    "sign_preserving": assert_sign_preserving,
    "norm_non_increasing": assert_norm_non_increasing,
    "unbiased": assert_unbiased,
    "deterministic": assert_deterministic,
}


@pytest.mark.parametrize("transform", ALL, ids=str)
def test_every_declared_law_holds(transform: Transform) -> None:
    assert_laws(transform, 25)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ALL, ids=str)
def test_every_declared_law_holds_on_many_more(transform: Transform) -> None:
    assert_laws(transform, 120)


def test_every_law_has_its_assertion() -> None:
    assert set(ASSERTIONS) == set(get_args(Law))


def assert_laws(transform: Transform, number: int) -> None:
    for law in sorted(transform.laws):
        few = max(1, number // 12) if law == "unbiased" else number
        assert_law(ASSERTIONS[law], transform, few)


def assert_law(assertion: Assertion, transform: Transform, number: int) -> None:
    @settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    @given(draw=draws())
    def holds(draw: Draw) -> None:
        assertion(transform, draw)

    holds()


class Liar(Stateless):
    """Declares one law it breaks."""

    def __init__(self, law: Law, breaks: Callable[[Tensor, Context], Tensor]) -> None:
        self.law: Law = law
        self.breaks = breaks

    @property
    def laws(self) -> frozenset[Law]:
        return frozenset({self.law})

    def apply(self, grad: Tensor, context: Context) -> Tensor:
        return self.breaks(grad, context)


def drawn(grad: Tensor, context: Context) -> Tensor:
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


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.law)
def test_a_law_that_does_not_hold_is_caught(liar: Liar) -> None:
    with pytest.raises(AssertionError):
        assert_laws(liar, 25)


def test_there_is_a_liar_for_every_law() -> None:
    assert {liar.law for liar in LIARS} == set(ASSERTIONS)


class Difference(Transform):
    """Linear in its whole past, not in one gradient."""

    @property
    def laws(self) -> frozenset[Law]:
        return frozenset({"linear"})

    def init(self, grad: Tensor) -> State:
        return {"last": torch.zeros_like(grad)}

    def update(self, grad: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        return grad - state["last"], {"last": grad.clone()}


def test_a_law_is_checked_with_a_past() -> None:
    with pytest.raises(AssertionError):
        assert_laws(Difference(), 25)
