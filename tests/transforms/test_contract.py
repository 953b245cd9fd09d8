"""What every transform promises, whatever it does."""

import dataclasses

import pytest
import torch
from torch import Tensor

from gradsurg.testing import check_transform
from gradsurg.testing.transforms import DTYPES, context_with, noise
from gradsurg.transforms.base import TransformContext, TransformState
from tests.cases import INF, NAN, build, names

# Of other gradients alone, by a matrix that is drawn once for all.
MADE_ANEW = ("direct_feedback", "feedback_weights")
# They say so in their docstrings; every other transform keeps a NaN where it finds one.
DROP_NAN = ("random_mask", "sanitize", "zero", *MADE_ANEW)
ALWAYS_FINITE = ("sanitize", "zero")

every_config = pytest.mark.parametrize("name", names())


@every_config
def test_every_config_keeps_the_rules_and_its_laws(name: str) -> None:
    check_transform(build(name), drops_nan=name in DROP_NAN)


@pytest.mark.parametrize("name", ALWAYS_FINITE)
def test_those_that_drop_a_nan_are_told_from_the_others(name: str) -> None:
    with pytest.raises(AssertionError, match="propagates_nan: a NaN becomes 0"):
        check_transform(build(name))


@pytest.mark.parametrize("name", ALWAYS_FINITE)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_made_so(name: str, bad: float) -> None:
    for shape in ((1,), (3,), (2, 3), (4, 3, 3, 3)):
        for dtype in DTYPES:
            grad = noise(shape, dtype)
            grad.view(-1)[0] = bad
            transform = build(name)
            assert (
                transform.update(grad, transform.init(grad), TransformContext())[0].isfinite().all()
            )


@every_config
def test_only_what_is_random_changes_with_seed_site_step_and_call(name: str) -> None:
    transform = build(name)
    grad = noise((4, 50), torch.float32)
    base = context_with(grad)
    first = transform.update(grad, transform.init(grad), base)[0]
    for change in ({"seed": 1}, {"site": "b.weight"}, {"call": 1}):
        other = dataclasses.replace(base, **change)
        result = transform.update(grad, transform.init(grad), other)[0]
        fixed = "deterministic" in transform.properties or (name in MADE_ANEW and "call" in change)
        assert torch.equal(result, first) == fixed


@every_config
def test_made_twice_it_is_the_same_value(name: str) -> None:
    transform = build(name)
    assert build(name) == transform
    assert hash(build(name)) == hash(transform)
    assert repr(build(name)) == repr(transform)
    with pytest.raises(AttributeError):
        setattr(transform, next(iter(vars(transform)), "anything"), None)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("chain", "mask") else pytest.param(name, marks=pytest.mark.slow)
        for name in names()
    ],
)
def test_compiled_whole_it_gives_the_same(name: str) -> None:
    transform = build(name)
    if "deterministic" not in transform.properties:
        pytest.skip("a generator is made outside of the graph")
    grad, value = noise((4, 3), torch.float32), noise((4, 3), torch.float32, seed=1)
    state = transform.init(grad)

    def step(grad: Tensor, value: Tensor, state: TransformState) -> tuple[Tensor, TransformState]:
        return transform.update(grad, state, TransformContext(step=500, value=value))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result, after = compiled(grad, value, state)
    expected, expected_after = step(grad, value, state)
    torch.testing.assert_close(result, expected)
    assert after.keys() == expected_after.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, expected_after[key])
