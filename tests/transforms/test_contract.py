"""What every transform promises, whatever it does."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

from gradsurg.transforms.base import Context, State, Transform
from tests.cases import INF, NAN, build, names

SHAPES = ((), (0,), (3,), (2, 3), (4, 3, 3, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# They say so in their docstrings; every other transform keeps a NaN where it finds one.
DROP_NAN = ("random_mask", "sanitize", "zero")
ALWAYS_FINITE = ("sanitize", "zero")

every_config = pytest.mark.parametrize("name", names())
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_config
@every_shape
@every_dtype
def test_two_steps_keep_the_contract(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    transform = build(name)
    grad = noise(shape, dtype)
    state = transform.init(grad)
    for step in range(2):
        grad = noise(shape, dtype, seed=step)
        context = Context("a.weight", step, value=noise(shape, dtype, seed=7))
        before = [grad.clone(), *(tensor.clone() for tensor in state.values())]
        result, after = transform.update(grad, state, context)
        assert_like(result, grad)
        assert result.isfinite().all()
        assert_same_bits([grad, *state.values()], before)
        assert_unaliased(result, grad, after)
        assert_same_structure(after, state)
        state = after


@every_config
@every_dtype
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_a_finite_gradient_stays_finite(name: str, dtype: torch.dtype, scale: float) -> None:
    for shape in SHAPES:
        grad = noise(shape, dtype).sign() * scale
        result = once(build(name), grad)
        assert_like(result, grad)
        assert result.isfinite().all()


@every_config
@every_dtype
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_raises_nothing_and_no_nan_is_lost(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    for shape in ((1,), (3,), (2, 3), (4, 3, 3, 3)):
        grad = noise(shape, dtype)
        grad.view(-1)[0] = bad
        result = once(build(name), grad)
        assert_like(result, grad)
        if bad != bad and name not in DROP_NAN:
            assert result.view(-1)[0].isnan()
        if name in ALWAYS_FINITE:
            assert result.isfinite().all()


@every_config
def test_the_first_state_does_not_depend_on_the_gradients_values(name: str) -> None:
    transform = build(name)
    one, other = (transform.init(noise((2, 3), torch.bfloat16, seed)) for seed in (1, 2))
    assert_same_structure(one, other)
    assert_same_bits(list(one.values()), list(other.values()))


@every_config
def test_a_state_is_of_float32_or_wider(name: str) -> None:
    state = build(name).init(noise((2, 3), torch.bfloat16))
    assert all(tensor.dtype != torch.bfloat16 for tensor in state.values())


@every_config
def test_the_layout_in_memory_does_not_matter(name: str) -> None:
    straight = noise((3, 2), torch.float32)
    turned = straight.t().contiguous().t()
    torch.testing.assert_close(once(build(name), turned), once(build(name), straight))
    spread = torch.tensor([0.3]).expand(2, 3)
    torch.testing.assert_close(once(build(name), spread), once(build(name), spread.clone()))


@every_config
def test_the_global_generator_is_left_alone(name: str) -> None:
    state = torch.get_rng_state()
    once(build(name), noise((2, 3), torch.float32))
    torch.manual_seed(0)  # A draw from the global generator would now be another one.
    again = once(build(name), noise((2, 3), torch.float32))
    torch.set_rng_state(state)
    once_more = once(build(name), noise((2, 3), torch.float32))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits([again], [once_more])


@every_config
def test_only_what_is_random_changes_with_seed_site_step_and_call(name: str) -> None:
    transform = build(name)
    grad = noise((4, 50), torch.float32)
    base = Context("a.weight", value=grad)
    others = [dataclasses.replace(base, **{key: 1}) for key in ("seed", "call")]
    others += [dataclasses.replace(base, site="b.weight")]
    first = transform.update(grad, transform.init(grad), base)[0]
    for other in others:
        result = transform.update(grad, transform.init(grad), other)[0]
        assert torch.equal(result, first) == ("deterministic" in transform.laws)


@every_config
def test_a_value_that_requires_grad_leaves_no_graph_behind(name: str) -> None:
    value = noise((2, 3), torch.float32).requires_grad_()
    grad = noise((2, 3), torch.float32)
    transform = build(name)
    result, state = transform.update(grad, transform.init(grad), Context(value=value))
    assert not any(tensor.requires_grad for tensor in (result, *state.values()))


@every_config
def test_nothing_waits_for_the_device(name: str) -> None:
    transform = build(name)
    if "deterministic" not in transform.laws:
        pytest.skip("a meta tensor has no generator")
    for shape in SHAPES:
        # A meta tensor has no values: reading one, as a branch or `.item()` does, raises.
        grad = torch.empty(shape, device="meta")
        state = transform.init(grad)
        result, _ = transform.update(grad, state, Context(step=500, value=grad))
        assert_like(result, grad)


@every_config
def test_it_is_a_value(name: str) -> None:
    transform = build(name)
    for twin in (build(name), copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert twin == transform
        assert hash(twin) == hash(transform)
        assert repr(twin) == repr(transform)
    with pytest.raises(AttributeError):
        setattr(transform, next(iter(vars(transform)), "anything"), None)


@every_config
def test_a_batch_by_vmap_is_the_same_as_a_loop(name: str) -> None:
    transform = build(name)
    if "deterministic" not in transform.laws:
        pytest.skip("one generator cannot serve a batch")
    for shape in ((), (3,), (2, 3), (2, 3, 2)):
        grads, values = noise((5, *shape), torch.float32), noise((5, *shape), torch.float32, 1)
        state = transform.init(grads[0])

        def step(grad: Tensor, value: Tensor, state: State = state) -> tuple[Tensor, State]:
            return transform.update(grad, state, Context(step=500, value=value))

        loop = [step(grad, value) for grad, value in zip(grads, values, strict=True)]
        batch, states = torch.vmap(step)(grads, values)
        torch.testing.assert_close(batch, torch.stack([result for result, _ in loop]))
        for key, tensor in states.items():
            torch.testing.assert_close(tensor, torch.stack([after[key] for _, after in loop]))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("chain", "mask") else pytest.param(name, marks=pytest.mark.slow)
        for name in names()
    ],
)
def test_compiled_whole_it_gives_the_same(name: str) -> None:
    transform = build(name)
    if "deterministic" not in transform.laws:
        pytest.skip("a generator is made outside of the graph")
    grad, value = noise((4, 3), torch.float32), noise((4, 3), torch.float32, seed=1)
    state = transform.init(grad)

    def step(grad: Tensor, value: Tensor, state: State) -> tuple[Tensor, State]:
        return transform.update(grad, state, Context(step=500, value=value))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result, after = compiled(grad, value, state)
    expected, expected_after = step(grad, value, state)
    torch.testing.assert_close(result, expected)
    assert after.keys() == expected_after.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, expected_after[key])


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def once(transform: Transform, grad: Tensor) -> Tensor:
    context = Context("a.weight", value=noise(tuple(grad.shape), grad.dtype, seed=7))
    return transform.update(grad, transform.init(grad), context)[0]


def assert_like(result: Tensor, grad: Tensor) -> None:
    assert result.shape == grad.shape
    assert result.dtype == grad.dtype
    assert result.device == grad.device
    assert result.layout == grad.layout


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_unaliased(result: Tensor, grad: Tensor, state: State) -> None:
    """No two of them share memory; but the result may be the gradient, the very same object."""
    tensors = [*state.values(), grad] + ([] if result is grad else [result])
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    assert len(set(storages)) == len(storages)


def assert_same_structure(state: State, other: State) -> None:
    def structure(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}

    assert structure(state) == structure(other)
