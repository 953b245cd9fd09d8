"""`check_transform`: test which properties a transform has and that it obeys all rules."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isnan
from random import Random
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gradsurg.testing.verdicts import (
    Table,
    declared_among,
    expect,
    expect_generator_untouched,
    expect_like,
    expect_same_structure,
    expect_unshared,
    expect_value_semantics,
    failures_at,
    printed,
    table_of,
)
from gradsurg.transforms.base import (
    SKIPPED,
    Function,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    as_transform,
    init_all,
    update_all,
)
from gradsurg.transforms.layer_calls import LayerCall

Shape = tuple[int, ...]

SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 2, 2), (4, 3, 3, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STEPS = (0, 1, 300, 1000, 5000)
LARGE = 2.0**16
TOLERANCE = 1e-9
NEAR_OVERFLOW = (307, 308)
LONG_PAST = 100
"""Gradients before the one under test, in every fifth case; 1 in the others."""


def check_transform(
    transform: Transform | Callable[[Tensor], Tensor],
    *,
    declared: Collection[TransformProperty] | None = None,
    shapes: Sequence[Shape] = SHAPES,
    drops_nan: bool = False,
    count: int = 25,
) -> Table:
    """Test a transform, or a plain function of one gradient, on `count` random gradients.

    Each property in `TransformProperty` is tested; a transform with the scope `group` gets the
    parts of each gradient as a group. The rules require a finite result of the same shape and
    dtype, no modification of the inputs, no synchronization with the device, independence of the
    global random generator, and more: the keys of `RULES`.

    `declared` replaces the properties that the transform declares. `shapes` are the shapes that
    it supports. Set `drops_nan` for a transform that is meant to remove NaN. Raises AssertionError,
    with one line a fault, if a declared property does not hold or a rule is violated, TypeError if
    `transform` is neither a transform nor a function, ValueError for an unknown property.
    """
    checked = as_transform(transform)
    if not isinstance(checked, Transform):
        raise TypeError(f"check_transform takes a transform or a function, found {transform!r}")
    properties = declared_among(get_args(TransformProperty), declared, checked.properties)
    subject = Subject(checked, properties, tuple(shapes), drops_nan)
    acts = _acts(subject, count)
    if not acts:  # it may act on infinities, which some checks make of numbers near overflow
        subject = replace(subject, exponents=NEAR_OVERFLOW)
        acts = _acts(subject, count)
    checks = {}
    for name, check in PROPERTY_CHECKS.items():
        is_slow = name == "unbiased" and name in properties  # a case draws hundreds of times
        cases = max(1, count // 12) if is_slow else count
        checks[name] = partial(_check_all, check, subject, cases)
    rules = {name: partial(_check_shapes, rule, subject) for name, rule in RULES.items()}
    table = table_of(repr(checked), properties, checks, rules)
    if acts:
        return table
    verdicts = (replace(one, tested=one.declared) for one in table.verdicts)
    return replace(table, verdicts=tuple(verdicts))


@dataclass(frozen=True)
class Subject:
    """The transform under test, its declared properties and the shapes that it supports."""

    transform: Transform
    properties: frozenset[TransformProperty]
    shapes: tuple[Shape, ...]
    drops_nan: bool
    exponents: tuple[int, int] = (-3, 2)
    """The scales of the gradients in the checks of properties, as powers of 10."""

    @property
    def is_function(self) -> bool:
        """Whether it is a plain function, which may synchronize and need not equal its copies."""
        return isinstance(self.transform, Function)

    def first_result(self, grad: Tensor) -> Tensor:
        """Return the result for a first gradient."""
        context = context_with(noise(tuple(grad.shape), grad.dtype, seed=7))
        return self.transform.update(grad, self.transform.init(grad), context)[0]


@dataclass(slots=True)
class _Backward:
    error: Tensor | None
    batch: Mapping[str, Tensor]
    task: str = ""


def context_with(value: Tensor, step: int = 0, factor: float = 1.0) -> TransformContext:
    """Return a context that satisfies every `Need`.

    `factor * value` serves as the gradient of the node's output, of the model's output and of the
    update. The labels are 0, 1, 2 and so on, times 3 and modulo 10. No single examples are known.
    """
    batch = {"labels": torch.arange(len(value)) * 3 % 10} if value.ndim else {}
    other = value if factor == 1 else value * factor
    backward, layer = _Backward(other, batch), LayerCall(nn.Identity(), value, value, other)
    return TransformContext(
        "a.weight", step, value, backward=backward, entering=(other,), layer=layer, gradient=other
    )


def noise(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of standard normal entries."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class _Examples:
    """Four examples, whose gradients are linear in g and have the sum g."""

    count, shares = 4, None

    def __init__(self, grad: Tensor) -> None:
        first, second, third = noise((3, *grad.shape), grad.dtype) * grad
        third = third + grad.flatten().roll(1).view_as(grad)
        self.all = torch.stack([first, second, third, grad - first - second - third])

    def norms(self) -> Tensor:
        return self.all.reshape(self.count, -1).norm(dim=1)

    def weighted(self, weights: Tensor) -> list[Tensor]:
        return [torch.tensordot(weights, self.all, 1)]

    def rows(self, scale: float) -> Iterator[list[Tensor]]:
        yield [self.all * scale]

    # Any: an aggregator, which `Examples` does not know either.
    def merged(self, aggregator: Any, context: TransformContext) -> list[Tensor]:
        return [aggregator(self.all.reshape(self.count, -1)).view(self.all.shape[1:])]


@dataclass
class Case:
    """Input of a property check: gradients g and h and their context, and those before them."""

    g: Tensor
    h: Tensor
    context: TransformContext
    past: Tensor
    past_context: TransformContext
    num_past: int

    def scaled(self, factor: float) -> "Case":
        """Return the case with the contexts' gradients multiplied by `factor`, not g and h."""
        contexts = []
        for context in (self.context, self.past_context):
            assert context.value is not None
            contexts.append(context_with(context.value, context.step, factor))
        return replace(self, context=contexts[0], past_context=contexts[1])

    def state(self, transform: Transform) -> TransformState:
        """Return the state after the gradient `past`, which came `num_past` times."""
        state = init_all(transform, _parts(transform, self.past))
        for _ in range(self.num_past if state else 0):
            _, state = _updated(transform, self.past, state, self.past_context)
        return state

    def function(self, transform: Transform) -> Callable[[Tensor], Tensor]:
        """Return the transform as a function of g, with the state after `past`."""
        state = self.state(transform)
        return lambda grad: _updated(transform, grad, state, self.context)[0]

    def __str__(self) -> str:
        return f"g = {printed(self.g)}"


def _parts(transform: Transform, tensor: Tensor | None) -> Sequence[Tensor]:
    """Split a tensor of 3 rows or more for a group, unless a need belongs to the whole tensor."""
    assert tensor is not None
    is_split = transform.scope == "group" and transform.needs <= {"value", "gradient", "skip"}
    rows = len(tensor) if tensor.ndim and is_split else 0
    return [tensor] if rows < 3 else tensor.split([1, rows // 3, rows - 1 - rows // 3])


def _updated(
    transform: Transform, grad: Tensor, state: TransformState, context: TransformContext
) -> tuple[Tensor, TransformState]:
    """Return the new gradient, zero if it skips the step, and the new state."""
    if "examples" in transform.needs:
        context = replace(context, examples=_Examples(grad))
    grads, *others = (_parts(transform, one) for one in (grad, context.value, context.gradient))
    contexts = [
        replace(context, site=f"{context.site}{index or ''}", value=value, gradient=other)
        for index, (value, other) in enumerate(zip(*others, strict=True))
    ]
    results, after = update_all(transform, grads, state, contexts)
    if "skip" in transform.needs and after[SKIPPED] > state[SKIPPED]:
        return torch.zeros_like(grad), after
    return torch.cat([*results]) if len(grads) > 1 else next(iter(results)), after


def _check_all(check: Callable[[Transform, Case], None], subject: Subject, count: int) -> None:
    for case in _cases(subject, count):
        check(subject.transform, case)


def _acts(subject: Subject, count: int) -> bool:
    """Whether it changes a gradient of the cases: one that does not decides no property."""
    try:
        with failures_at(""):
            for case in _cases(subject, count):
                function = case.function(subject.transform)
                if any(not torch.equal(function(grad), grad) for grad in (case.g, LARGE * case.g)):
                    return True
            return False
    except AssertionError:
        return True


def _check_shapes(rule: Callable[[Subject, Shape], None], subject: Subject) -> None:
    for shape in subject.shapes:
        rule(subject, shape)


def _cases(subject: Subject, count: int) -> Iterator[Case]:
    """Yield cases at several scales, some with zeros, equal entries or a single sign."""
    for index in range(count):
        choice = Random(index)
        generator = torch.Generator().manual_seed(index)
        shape = subject.shapes[(index + 2) % len(subject.shapes)]
        tensors = [_gradient(shape, subject, choice, generator) for _ in range(5)]
        g, h, past, value, past_value = tensors
        step = STEPS[index // len(subject.shapes) % len(STEPS)]
        contexts = [context_with(value, step), context_with(past_value, step)]
        yield Case(g, h, contexts[0], past, contexts[1], 1 if index % 5 else LONG_PAST)


def _gradient(shape: Shape, subject: Subject, choice: Random, generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    signed = normal.abs() if choice.random() < 0.5 else normal
    coarse = (signed * 2).round() / 2 if choice.random() < 0.5 else signed
    # A gradient near overflow stays finite.
    return (coarse * 10.0 ** choice.randint(*subject.exponents)).nan_to_num()


def _elementwise(transform: Transform, case: Case) -> None:
    function = case.function(transform)
    is_even = torch.arange(case.g.numel()).reshape(case.g.shape) % 2 == 0
    mixed = torch.where(is_even, case.g, case.h)
    text = "with every second entry replaced"
    _expect_close(function(mixed)[is_even], function(case.g)[is_even], case, text)


def _homogeneous(transform: Transform, case: Case) -> None:
    result = case.function(transform)(case.g)
    for factor in (0.125, 3.0, LARGE):
        scaled = case.scaled(factor).function(transform)(factor * case.g)
        _expect_close(scaled, factor * result, case, f"times {factor:g}")


def _idempotent(transform: Transform, case: Case) -> None:
    function = case.function(transform)
    once = function(case.g)
    _expect_close(function(once), once, case, "twice")


def _linear(transform: Transform, case: Case) -> None:
    function = case.function(transform)
    expected = 2 * function(case.g) - 3 * function(case.h)
    result = function(2 * case.g - 3 * case.h)
    _expect_close(result, expected, case, f"2 g - 3 h, h = {printed(case.h)}")
    backward = _Backward(case.context.error, case.context.batch, "task")
    other_task = replace(case, context=replace(case.context, backward=backward))
    _expect_close(other_task.function(transform)(case.g), function(case.g), case, "of another task")


def _odd(transform: Transform, case: Case) -> None:
    function = case.function(transform)
    _expect_close(function(-case.g), -function(case.g), case, "with the other sign")


def _sign_preserving(transform: Transform, case: Case) -> None:
    result = case.function(transform)(case.g)
    preserved = (result * case.g >= 0).all() and (result[case.g == 0] == 0).all()
    expect(preserved, f"{case}: {printed(result)} has other signs")


def _norm_non_increasing(transform: Transform, case: Case) -> None:
    before, after = case.g.norm(), case.function(transform)(case.g).norm()
    expect(after <= before * (1 + 1e-12), f"{case}: |g| = {before:.6g} becomes {after:.6g}")


def _unbiased(transform: Transform, case: Case) -> None:
    draws = 1 if "deterministic" in transform.properties else 400  # 1 where all are equal
    state = case.state(transform)
    contexts = [replace(case.context, seed=seed) for seed in range(draws)]
    results = torch.stack([_updated(transform, case.g, state, one)[0] for one in contexts])
    mean = results.mean(dim=0)
    error = (results - mean).square().mean(dim=0).sqrt() / draws**0.5
    is_near = ((mean - case.g).abs() <= 6 * error + 1e-9 * case.g.abs()).all()
    expect(is_near, f"{case}: the mean over {draws} seeds is {printed(mean)}")


def _deterministic(transform: Transform, case: Case) -> None:
    first = case.function(transform)(case.g)
    for change in ({"seed": 1}, {"site": "b.weight"}, {"call": 1}):
        changed = replace(case, context=replace(case.context, **change))
        same = torch.equal(changed.function(transform)(case.g), first)
        expect(same, f"{case}: another result with {change}")


def _differentiable(transform: Transform, case: Case) -> None:
    """The second derivatives through a hook are those by finite differences, away from kinks."""
    shape, state = tuple(case.g.shape), case.state(transform)
    if not case.g.numel():
        return
    x, grad = (noise(shape, torch.float64, seed).requires_grad_() for seed in (1, 2))

    def hooked(x: Tensor) -> Tensor:
        y = 2 * x
        context = context_with(y, case.context.step)
        y.register_hook(lambda grad: _updated(transform, grad, state, context)[0])
        return y

    right = torch.autograd.gradgradcheck(hooked, x, grad, fast_mode=True, raise_exception=False)
    expect(right, f"at g = {printed(grad)}: another derivative by finite differences")


def _expect_close(result: Tensor, expected: Tensor, case: Case, text: str) -> None:
    same = torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    expect(same, f"{case}, {text}: {printed(result)} and not {printed(expected)}")


PROPERTY_CHECKS: dict[TransformProperty, Callable[[Transform, Case], None]] = {
    "elementwise": _elementwise,
    "homogeneous": _homogeneous,
    "idempotent": _idempotent,
    "linear": _linear,
    "odd": _odd,
    "sign_preserving": _sign_preserving,
    "norm_non_increasing": _norm_non_increasing,
    "unbiased": _unbiased,
    "deterministic": _deterministic,
    "differentiable": _differentiable,
}
"""Assertion of each property for one case."""


def _pure(subject: Subject, shape: Shape) -> None:
    """Two steps at every dtype modify no input and return tensors like the inputs."""
    transform = subject.transform
    for dtype in DTYPES:
        text = f"{dtype} of shape {list(shape)}"
        state = transform.init(noise(shape, dtype))
        for step in range(2):
            grad, value = noise(shape, dtype, seed=step), noise(shape, dtype, seed=7)
            inputs = [grad, value, *state.values()]
            copies = [tensor.clone() for tensor in inputs]
            result, after = transform.update(grad, state, context_with(value, step))
            expect_like(result, grad, text)
            expect(result.isfinite().all(), f"{text}: {printed(result)}")
            names = ("the gradient", "the value", *(f"'{key}' of its state" for key in state))
            for name, tensor, before in zip(names, inputs, copies, strict=True):
                expect(torch.equal(tensor, before), f"writes into {name}, {text}")
            _expect_unaliased(result, grad, after)
            expect_same_structure(state, after, f"the state changes its form, {text}")
            state = after


def _expect_unaliased(result: Tensor, grad: Tensor, state: TransformState) -> None:
    """Expect no shared memory, except that the result may be the gradient, the same object."""
    if result is not grad:
        expect_unshared(result, [grad], "the gradient")
    tensors = [*state.values()]
    for index, tensor in enumerate(tensors):
        others = [grad, result, *tensors[:index]]
        expect_unshared(tensor, others if tensor.numel() else [], "the state")


def _finite(subject: Subject, shape: Shape) -> None:
    for scale, dtype in product((0.0, 1e-30, 1e30), DTYPES):
        grad = noise(shape, dtype).sign() * min(scale, torch.finfo(dtype).max / 64)
        text = f"{dtype} of shape {list(shape)}, scale {scale:g}"
        with failures_at(text):
            result = subject.first_result(grad)
        expect_like(result, grad, text)
        expect(result.isfinite().all(), f"{text}: {printed(result)}")


def _propagates_nan(subject: Subject, shape: Shape) -> None:
    """NaN and infinities raise no error, and NaN is kept unless `drops_nan` is set."""
    if not shape or 0 in shape:
        return
    for nonfinite, dtype in product((torch.nan, torch.inf, -torch.inf), DTYPES):
        grad = noise(shape, dtype)
        grad.view(-1)[0] = nonfinite
        result = subject.first_result(grad)
        expect_like(result, grad, f"{dtype} of shape {list(shape)} with {nonfinite}")
        if isnan(nonfinite) and not subject.drops_nan:
            first = result.reshape(-1)[0]
            expect(first.isnan(), f"a NaN becomes {printed(first)}")


def _initial_state(subject: Subject, shape: Shape) -> None:
    """The first state does not depend on the gradient's values and is in float32 or wider."""
    init = subject.transform.init
    state, other = (init(noise(shape, torch.bfloat16, seed)) for seed in (1, 2))
    expect_same_structure(state, other, "the first state changes its form")
    for key, tensor in state.items():
        same = torch.equal(tensor, other[key])
        expect(same, f"'{key}' of the first state depends on the gradient's values")
        is_wide = tensor.dtype not in (torch.bfloat16, torch.float16)
        expect(is_wide, f"'{key}' of the state is of {tensor.dtype}")


def _any_memory_layout(subject: Subject, shape: Shape) -> None:
    if len(shape) < 2:
        return
    contiguous = noise(shape, torch.float32)
    transposed = contiguous.transpose(0, 1).contiguous().transpose(0, 1)
    vector = noise(shape[:1], torch.float32).reshape(-1, *[1] * (len(shape) - 1))
    expanded = vector.expand(shape)
    for grad, plain in ((transposed, contiguous), (expanded, expanded.clone())):
        same = _is_close(subject.first_result(grad), subject.first_result(plain))
        expect(same, f"another result for other strides of shape {list(shape)}")


def _no_global_rng(subject: Subject, shape: Shape) -> None:
    expect_generator_untouched(partial(subject.first_result, noise(shape, torch.float32)))


def _no_autograd_graph(subject: Subject, shape: Shape) -> None:
    """A value that requires grad does not make the result or the state require grad."""
    grad = noise(shape, torch.float32)
    context = context_with(noise(shape, torch.float32).requires_grad_())
    result, after = subject.transform.update(grad, subject.transform.init(grad), context)
    for tensor in (result, *after.values()):
        expect(not tensor.requires_grad, "the result or the state is part of a graph")


def _no_synchronization(subject: Subject, shape: Shape) -> None:
    """A meta tensor, which has no values to branch on, is accepted.

    Transforms that draw are skipped, for there are no generators of meta tensors.
    """
    if subject.is_function or "deterministic" not in subject.properties:
        return
    grad = torch.empty(shape, device="meta")
    state = subject.transform.init(grad)
    result, _ = subject.transform.update(grad, state, context_with(grad, 500))
    expect_like(result, grad, f"a meta tensor of shape {list(shape)}")


def _value_semantics(subject: Subject, shape: Shape) -> None:
    if subject.is_function:
        return
    transform = subject.transform
    expect_value_semantics(transform)
    key = next(iter(vars(transform)), "anything")
    try:
        setattr(transform, key, vars(transform).get(key))
    except AttributeError:
        return
    raise AssertionError(f"'{key}' can be changed")


def _vmap(subject: Subject, shape: Shape) -> None:
    """`torch.vmap` and a loop give the same; transforms that draw are skipped."""
    if subject.is_function or "deterministic" not in subject.properties or 0 in shape:
        return
    grads, values = noise((5, *shape), torch.float32), noise((5, *shape), torch.float32, 1)
    state = subject.transform.init(grads[0])

    def step(grad: Tensor, value: Tensor) -> tuple[Tensor, TransformState]:
        return subject.transform.update(grad, state, context_with(value, 500))

    loop = [step(grad, value) for grad, value in zip(grads, values, strict=True)]
    try:
        batch, states = torch.vmap(step)(grads, values)
    except UserWarning as slow:  # warnings are errors in the tests
        text = "use operations that vmap batches, such as sort in place of quantile"
        raise AssertionError(f"{text}: {str(slow).partition('.')[0]}") from slow
    pairs = {"the result": (batch, torch.stack([result for result, _ in loop]))}
    for key, tensor in states.items():
        pairs[f"'{key}'"] = (tensor, torch.stack([after[key] for _, after in loop]))
    for name, (batched, looped) in pairs.items():
        same = _is_close(batched, looped)
        expect(same, f"{name} of a batch of shape {list(shape)} differs from a loop")


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1.3e-6, atol=1e-5)


RULES: dict[str, Callable[[Subject, Shape], None]] = {
    "pure": _pure,
    "finite": _finite,
    "propagates_nan": _propagates_nan,
    "initial_state": _initial_state,
    "any_memory_layout": _any_memory_layout,
    "no_global_rng": _no_global_rng,
    "no_autograd_graph": _no_autograd_graph,
    "no_synchronization": _no_synchronization,
    "value_semantics": _value_semantics,
    "vmap": _vmap,
}
"""Rules that every transform must obey, each tested at one shape."""
