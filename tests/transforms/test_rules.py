"""Randomness, compilation and finite results of every transform; `check_transform` has the rest."""

import dataclasses

import pytest
import torch
from torch import Tensor

from gradsurg.testing import check_transform
from gradsurg.testing.transforms import DTYPES, context_with, noise
from gradsurg.transforms.base import (
    Scaling,
    TransformContext,
    TransformState,
    init_all,
    update_all,
)
from gradsurg.triggers.base import Clock
from tests.transforms.cases import INF, NAN, build, names

# Their results do not depend on the incoming gradient.
FROM_OTHER_GRADIENTS = ("direct_feedback", "feedback_weights")
# Their random matrix does not depend on the call.
FIXED_DRAWS = (*FROM_OTHER_GRADIENTS, "gpm", "ogd", "project_subspace")
ALWAYS_FINITE = ("sanitize", "zero")

every_config = pytest.mark.parametrize("name", names())


@pytest.mark.parametrize("name", ALWAYS_FINITE)
def test_dropping_a_nan_must_be_declared(name: str) -> None:
    with pytest.raises(AssertionError, match="propagates_nan: a NaN becomes 0"):
        check_transform(build(name))


@pytest.mark.parametrize("name", ALWAYS_FINITE)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_infinities_become_finite(name: str, bad: float) -> None:
    for shape in ((1,), (3,), (2, 3), (4, 3, 3, 3)):
        for dtype in DTYPES:
            grad = noise(shape, dtype)
            grad.view(-1)[0] = bad
            transform = build(name)
            assert (
                transform.update(grad, transform.init(grad), TransformContext())[0].isfinite().all()
            )


@every_config
def test_only_random_transforms_depend_on_seed_site_and_call(name: str) -> None:
    transform = build(name)
    grad = noise((4, 50), torch.float32)
    base = context_with(grad)
    first = transform.update(grad, transform.init(grad), base)[0]
    for change in ({"seed": 1}, {"site": "b.weight"}, {"call": 1}):
        other = dataclasses.replace(base, **change)
        result = transform.update(grad, transform.init(grad), other)[0]
        fixed = "deterministic" in transform.properties or (
            name in FIXED_DRAWS and "call" in change
        )
        assert torch.equal(result, first) == fixed


@every_config
def test_two_instances_of_a_config_are_equal_and_immutable(name: str) -> None:
    transform = build(name)
    assert build(name) == transform
    assert hash(build(name)) == hash(transform)
    assert repr(build(name)) == repr(transform)
    with pytest.raises(AttributeError):
        setattr(transform, next(iter(vars(transform)), "anything"), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in names() if isinstance(build(name), Scaling)])
def test_the_factors_of_a_scaling_give_the_results_of_its_update(
    name: str, dtype: torch.dtype
) -> None:
    transform = build(name)
    assert isinstance(transform, Scaling)
    assert not transform.init(noise((3,), dtype))
    for scale in (0.0, 1e-3, 1.0, 1e3):
        grads = [scale * noise(shape, dtype) for shape in ((3,), (2, 3), (4, 3, 3, 3))]
        contexts = [dataclasses.replace(context_with(grad), site=f"{grad.ndim}") for grad in grads]
        results, _ = update_all(transform, grads, init_all(transform, grads), contexts)
        factors = transform.factors(grads, contexts)
        for grad, factor, result in zip(grads, factors, results, strict=True):
            torch.testing.assert_close(grad * factor, result, rtol=0, atol=0)


SOONER = {"chain": (), "mask": (), "clip": pytest.mark.slow, "muon": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SOONER.get(name, pytest.mark.full)) for name in names()]
)
def test_a_compiled_transform_gives_the_same_result(name: str) -> None:
    transform = build(name)
    if "deterministic" not in transform.properties:
        pytest.skip("a generator is made outside of the graph")
    if "layer" in transform.needs:
        pytest.skip("it differentiates a module")
    grad, value = noise((4, 3), torch.float32), noise((4, 3), torch.float32, seed=1)
    state = transform.init(grad)
    clock = Clock(batch={"labels": torch.tensor([0, 1, 0, 1])})

    def step(grad: Tensor, value: Tensor, state: TransformState) -> tuple[Tensor, TransformState]:
        context = TransformContext(
            step=500, value=value, backward=clock, entering=(grad,), gradient=value
        )
        return transform.update(grad, state, context)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result, after = compiled(grad, value, state)
    expected, expected_after = step(grad, value, state)
    torch.testing.assert_close(result, expected)
    assert after.keys() == expected_after.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, expected_after[key])
