"""The rules that every transform must keep, whatever it does."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradsurg.testing.contexts import context_with
from gradsurg.testing.verdicts import (
    at,
    expect,
    expect_generator_untouched,
    expect_like,
    expect_same_structure,
    expect_unshared,
    written,
)
from gradsurg.transforms.base import FunctionTransform, Transform, TransformProperty, TransformState

SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 2, 2), (4, 3, 3, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """A transform, what is promised of it, and the shapes that it takes."""

    transform: Transform
    promised: frozenset[TransformProperty]
    shapes: tuple[tuple[int, ...], ...]
    drops_nan: bool

    @property
    def plain(self) -> bool:
        """Whether it is a function, which may wait for the device and need not be a value."""
        return isinstance(self.transform, FunctionTransform)

    def once(self, grad: Tensor) -> Tensor:
        """Its first result."""
        context = context_with(noise(tuple(grad.shape), grad.dtype, seed=7))
        return self.transform.update(grad, self.transform.init(grad), context)[0]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _pure(subject: Subject) -> None:
    """Two steps, at every shape and dtype."""
    transform = subject.transform
    for shape in subject.shapes:
        for dtype in DTYPES:
            state = transform.init(noise(shape, dtype))
            for step in range(2):
                text = f"{dtype} of shape {list(shape)}"
                grad = noise(shape, dtype, seed=step)
                value = noise(shape, dtype, seed=7)
                given = [grad, value, *state.values()]
                before = [tensor.clone() for tensor in given]
                result, after = transform.update(grad, state, context_with(value, step))
                expect_like(result, grad, text)
                expect(result.isfinite().all(), f"{text}: {written(result)}")
                names = ("the gradient", "the value", *(f"'{key}' of its state" for key in state))
                for name, one, two in zip(names, given, before, strict=True):
                    expect(torch.equal(one, two), f"writes into {name}, {text}")
                _expect_unaliased(result, grad, after)
                expect_same_structure(state, after, f"the state changes its form, {text}")
                state = after


def _expect_unaliased(result: Tensor, grad: Tensor, state: TransformState) -> None:
    """No two of them share memory; but the result may be the gradient, the very same object."""
    if result is not grad:
        expect_unshared(result, [grad], "the gradient")
    tensors = [*state.values()]
    for index, tensor in enumerate(tensors):
        others = [grad, result, *tensors[:index]]
        expect_unshared(tensor, others if tensor.numel() else [], "the state")


def _finite(subject: Subject) -> None:
    for scale in (0.0, 1e-30, 1e30):
        for dtype in DTYPES:
            for shape in subject.shapes:
                grad = noise(shape, dtype).sign() * scale
                text = f"{dtype} of shape {list(shape)}, scale {scale:g}"
                with at(text):
                    result = subject.once(grad)
                expect_like(result, grad, text)
                expect(result.isfinite().all(), f"{text}: {written(result)}")


def _nan_is_kept(subject: Subject) -> None:
    """What is not finite raises nothing, and no NaN is lost but by those that are meant to."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in DTYPES:
            for shape in subject.shapes:
                grad = noise(shape, dtype)
                if not grad.ndim or not grad.numel():
                    continue
                grad.view(-1)[0] = bad
                result = subject.once(grad)
                expect_like(result, grad, f"{dtype} of shape {list(shape)} with {bad}")
                if bad != bad and not subject.drops_nan:
                    kept = result.reshape(-1)[0].isnan()
                    expect(kept, f"a NaN becomes {written(result.reshape(-1)[0])}")


def _first_state(subject: Subject) -> None:
    """It does not depend on the values of the gradient, and is of float32 or wider."""
    for shape in subject.shapes:
        one, two = (subject.transform.init(noise(shape, torch.bfloat16, seed)) for seed in (1, 2))
        expect_same_structure(one, two, "the first state changes its form")
        for key in one:
            same = torch.equal(one[key], two[key])
            expect(same, f"'{key}' of the first state depends on the gradient's values")
            wide = one[key].dtype not in (torch.bfloat16, torch.float16)
            expect(wide, f"'{key}' of the state is of {one[key].dtype}")


def _any_layout(subject: Subject) -> None:
    for shape in subject.shapes:
        if len(shape) < 2:
            continue
        straight = noise(shape, torch.float32)
        turned = straight.transpose(0, 1).contiguous().transpose(0, 1)
        spread = noise(shape[:1], torch.float32).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        for odd, plain in ((turned, straight), (spread, spread.clone())):
            same = torch.allclose(subject.once(odd), subject.once(plain), rtol=1.3e-6, atol=1e-5)
            expect(same, f"another result where shape {list(shape)} lies in memory otherwise")


def _no_global_random_numbers(subject: Subject) -> None:
    for shape in subject.shapes:
        expect_generator_untouched(partial(subject.once, noise(shape, torch.float32)))


def _no_graph(subject: Subject) -> None:
    """A value that requires grad leaves no graph behind."""
    for shape in subject.shapes:
        grad = noise(shape, torch.float32)
        value = noise(shape, torch.float32).requires_grad_()
        state = subject.transform.init(grad)
        result, after = subject.transform.update(grad, state, context_with(value))
        for tensor in (result, *after.values()):
            expect(not tensor.requires_grad, "the result or the state is part of a graph")


def _nothing_waits(subject: Subject) -> None:
    """A meta tensor has no values: reading one, as a branch or `.item()` does, raises.

    It has no generator either, so what draws random numbers is not looked at.
    """
    if subject.plain or "deterministic" not in subject.promised:
        return
    for shape in subject.shapes:
        grad = torch.empty(shape, device="meta")
        state = subject.transform.init(grad)
        result, _ = subject.transform.update(grad, state, context_with(grad, 500))
        expect_like(result, grad, f"a meta tensor of shape {list(shape)}")


def _a_value(subject: Subject) -> None:
    if subject.plain:
        return
    transform = subject.transform
    for twin in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        expect(twin == transform, "a copy is not equal to it")
        expect(hash(twin) == hash(transform), "a copy has another hash")
        expect(repr(twin) == repr(transform), "a copy is written in another way")
    key = next(iter(vars(transform)), "anything")
    try:
        setattr(transform, key, vars(transform).get(key))
    except AttributeError:
        return
    raise AssertionError(f"'{key}' can be changed")


def _any_batch(subject: Subject) -> None:
    """`torch.vmap` gives what a loop does; one generator cannot serve a batch."""
    if subject.plain or "deterministic" not in subject.promised:
        return
    for shape in subject.shapes:
        if 0 in shape:
            continue
        grads, values = noise((5, *shape), torch.float32), noise((5, *shape), torch.float32, 1)
        state = subject.transform.init(grads[0])

        def step(
            grad: Tensor, value: Tensor, state: TransformState = state
        ) -> tuple[Tensor, TransformState]:
            return subject.transform.update(grad, state, context_with(value, 500))

        loop = [step(grad, value) for grad, value in zip(grads, values, strict=True)]
        batch, states = torch.vmap(step)(grads, values)
        pairs = {"the result": (batch, torch.stack([result for result, _ in loop]))}
        for key, tensor in states.items():
            pairs[f"'{key}'"] = (tensor, torch.stack([after[key] for _, after in loop]))
        for name, (one, two) in pairs.items():
            same = torch.allclose(one, two, rtol=1.3e-6, atol=1e-5)
            expect(same, f"{name} of a batch of shape {list(shape)} is not that of a loop")


RULES: dict[str, Callable[[Subject], None]] = {
    "pure": _pure,
    "finite": _finite,
    "nan_is_kept": _nan_is_kept,
    "first_state": _first_state,
    "any_layout": _any_layout,
    "no_global_random_numbers": _no_global_random_numbers,
    "no_graph": _no_graph,
    "nothing_waits": _nothing_waits,
    "a_value": _a_value,
    "any_batch": _any_batch,
}
"""What every transform must keep."""
