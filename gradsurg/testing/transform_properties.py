"""The properties of transforms as assertions, and the gradients they are checked on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from gradsurg.testing.contexts import context_with
from gradsurg.testing.verdicts import expect, written
from gradsurg.transforms.base import Transform, TransformContext, TransformProperty

EXACT = 1e-9
STEPS = (0, 1, 300, 1000, 5000)


@dataclass
class Draw:
    """What a law is checked on: two gradients, a past, a context."""

    g: Tensor
    h: Tensor
    past: Tensor
    context: TransformContext

    def times(self, factor: float) -> "Draw":
        """The same with the other gradients at hand so many times as large."""
        value, step = self.context.value, self.context.step
        assert value is not None
        return replace(self, context=context_with(value, step, factor))

    def act(self, transform: Transform) -> Callable[[Tensor], Tensor]:
        """The transform as a function, with the state that one gradient has left behind."""
        _, state = transform.update(self.past, transform.init(self.past), self.context)
        return lambda grad: transform.update(grad, state, self.context)[0]


@dataclass
class _Flow:
    """A gradient that is of a task."""

    task: str
    error: Tensor | None


def draws(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[Draw]:
    """Gradients of many scales, with zeros, equal entries and one sign in places."""
    for index in range(count):
        choice = Random(index)
        generator = torch.Generator().manual_seed(index)
        shape = shapes[(index + 2) % len(shapes)]
        grads = [_gradient(shape, choice, generator) for _ in range(4)]
        step = STEPS[index // len(shapes) % len(STEPS)]
        yield Draw(grads[0], grads[1], grads[2], context_with(grads[3], step))


def _gradient(shape: tuple[int, ...], choice: Random, generator: torch.Generator) -> Tensor:
    plain = torch.randn(shape, generator=generator, dtype=torch.float64)
    plain = plain.abs() if choice.random() < 0.5 else plain
    coarse = (plain * 2).round() / 2 if choice.random() < 0.5 else plain
    return coarse * 10.0 ** choice.randint(-3, 2)


def assert_elementwise(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    same = torch.arange(draw.g.numel()).reshape(draw.g.shape) % 2 == 0
    mixed = torch.where(same, draw.g, draw.h)
    assert_close(act(mixed)[same], act(draw.g)[same], draw, "with every second entry another")


def assert_homogeneous(transform: Transform, draw: Draw) -> None:
    once = draw.act(transform)(draw.g)
    for factor in (0.125, 3.0, 2.0**16):
        scaled = draw.times(factor).act(transform)(factor * draw.g)
        assert_close(scaled, factor * once, draw, f"times {factor:g}")


def assert_idempotent(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    once = act(draw.g)
    assert_close(act(once), once, draw, "twice")


def assert_linear(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    expected = 2 * act(draw.g) - 3 * act(draw.h)
    assert_close(act(2 * draw.g - 3 * draw.h), expected, draw, f"2 g - 3 h, h = {written(draw.h)}")
    flow = _Flow("task", draw.context.error)
    of_task = replace(draw, context=replace(draw.context, flow=flow)).act(transform)
    assert_close(of_task(draw.g), act(draw.g), draw, "of another task")


def assert_odd(transform: Transform, draw: Draw) -> None:
    act = draw.act(transform)
    assert_close(act(-draw.g), -act(draw.g), draw, "with the other sign")


def assert_sign_preserving(transform: Transform, draw: Draw) -> None:
    result = draw.act(transform)(draw.g)
    kept = (result * draw.g >= 0).all() and (result[draw.g == 0] == 0).all()
    expect(kept, f"{_at(draw)}: {written(result)} has other signs")


def assert_norm_non_increasing(transform: Transform, draw: Draw) -> None:
    before, after = draw.g.norm(), draw.act(transform)(draw.g).norm()
    expect(after <= before * (1 + 1e-12), f"{_at(draw)}: |g| = {before:.6g} becomes {after:.6g}")


def assert_unbiased(transform: Transform, draw: Draw) -> None:
    state = transform.init(draw.g)
    contexts = [replace(draw.context, seed=seed) for seed in range(400)]
    results = torch.stack([transform.update(draw.g, state, one)[0] for one in contexts])
    mean = results.mean(dim=0)
    error = (results - mean).square().mean(dim=0).sqrt() / len(contexts) ** 0.5
    near = ((mean - draw.g).abs() <= 6 * error + 1e-9 * draw.g.abs()).all()
    expect(near, f"{_at(draw)}: the mean of 400 draws is {written(mean)}")


def assert_deterministic(transform: Transform, draw: Draw) -> None:
    first = draw.act(transform)(draw.g)
    for change in ({"seed": 1}, {"site": "b.weight"}, {"call": 1}):
        other = replace(draw, context=replace(draw.context, **change)).act(transform)(draw.g)
        expect(torch.equal(other, first), f"{_at(draw)}: another result with {change}")


def assert_close(found: Tensor, expected: Tensor, draw: Draw, text: str) -> None:
    same = torch.allclose(found, expected, rtol=EXACT, atol=EXACT)
    expect(same, f"{_at(draw)}, {text}: {written(found)} and not {written(expected)}")


Assertion = Callable[[Transform, Draw], None]
LAWS: dict[TransformProperty, Assertion] = {
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


def _at(draw: Draw) -> str:
    return f"g = {written(draw.g)}"
