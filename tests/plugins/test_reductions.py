"""Which axes are reduced, and by what."""

import math
import weakref
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from einops import reduce
from torch import Tensor, distributed

from gradsurg.plugins import reductions
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.reductions import (
    direction,
    mean,
    norm,
    of_shards,
    reduced_axes,
    scaled,
    widened,
)
from gradsurg.transforms.norm_rescale import NormRescale
from tests.forks import Ranks, in_ranks

INF = float("inf")


@pytest.mark.parametrize(
    ("per", "ndim", "axes"),
    [
        ("tensor", 0, ()),
        ("tensor", 3, (0, 1, 2)),
        ("unit", 0, ()),
        ("unit", 1, (0,)),
        ("unit", 2, (1,)),
        ("unit", 4, (1, 2, 3)),
        ("entry", 3, ()),
        ("o i kh kw -> o", 4, (1, 2, 3)),
        ("out in -> in", 2, (0,)),
        ("a b -> b a", 2, ()),
        ("a ... -> a", 3, (1, 2)),
        ("a ... -> a", 1, ()),
        ("... a -> ...", 3, (2,)),
    ],
)
def test_per_names_what_is_kept_apart(per: str, ndim: int, axes: tuple[int, ...]) -> None:
    assert reduced_axes(per, ndim) == axes


@pytest.mark.parametrize(
    ("per", "ndim"), [("out in -> out", 1), ("out in -> out", 4), ("a b ... -> a", 1)]
)
def test_a_pattern_that_does_not_fit_is_told(per: str, ndim: int) -> None:
    with pytest.raises(ValueError, match=f"does not fit a tensor of {ndim} axes"):
        reduced_axes(per, ndim)


@pytest.mark.parametrize(
    "per", ["", "row", "a b", "a -> b", "a -> a -> a", "(a b) -> a", "a b -> c"]
)
def test_what_is_no_pattern_is_refused(per: str) -> None:
    with pytest.raises(FieldError, match=r"^NormRescale\.per: must be "):
        NormRescale(per=per)


@pytest.mark.parametrize("pattern", ["a b c -> a", "a b c -> c", "a b c -> b c"])
def test_a_mean_is_that_of_einops(pattern: str) -> None:
    grad = random(2, 3, 4)
    result = mean(grad, pattern)
    torch.testing.assert_close(result.squeeze(), reduce(grad, pattern, "mean").squeeze())
    assert (grad - result).shape == grad.shape


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, INF])
def test_a_norm_is_that_of_pytorch(p: float) -> None:
    grad = random(2, 3, 4)
    norms = norm(grad, "unit", p)
    assert norms.shape == (2, 1, 1)
    torch.testing.assert_close(norms.flatten(), torch.linalg.vector_norm(grad.flatten(1), p, dim=1))


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_a_norm_neither_vanishes_nor_overflows(scale: float, p: float) -> None:
    grad = torch.full((8,), scale)
    expected = grad[0].item() * 8 ** (0.0 if p == INF else 1 / p)
    assert math.isclose(norm(grad, "tensor", p).item(), expected, rel_tol=1e-3)


@pytest.mark.parametrize("per", ["tensor", "unit", "entry"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)], ids=str)
def test_empty_tensors_and_scalars_pass(per: str, shape: tuple[int, ...]) -> None:
    grad = random(*shape)
    for result in (norm(grad, per), norm(grad, per, INF), mean(grad, per), direction(grad, per)):
        assert (grad * result).shape == grad.shape


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 1e30, INF])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_a_norm_is_the_same_bits_under_vmap_and_where_values_cannot_be_read(
    p: float, scale: float
) -> None:
    grads = torch.stack([scale * random(3, 4), random(3, 4)])
    expected = torch.stack([norm(grad, "unit", p) for grad in grads])
    batched = torch.vmap(lambda grad: norm(grad, "unit", p))(grads)
    torch.testing.assert_close(batched, expected, rtol=0, atol=0, equal_nan=True)
    with patch.object(reductions, "_is_on_host", return_value=False):
        away = torch.stack([norm(grad, "unit", p) for grad in grads])
    torch.testing.assert_close(away, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_in_range_is_one_call_of_vector_norm(dtype: torch.dtype) -> None:
    grad = random(3, 4).to(dtype)
    with patch.object(torch.linalg, "vector_norm", wraps=torch.linalg.vector_norm) as calls:
        norm(grad, "tensor")
        assert calls.call_count == 1
        norm(grad.double() * 1e-200, "tensor")
        assert calls.call_count == 3


def test_scaled_gradients_are_made_one_at_a_time_in_their_own_dtype() -> None:
    grads = [torch.ones(3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    alive: list[weakref.ref[Tensor]] = []
    for result, grad in zip(scaled(grads, torch.tensor(0.5)), grads, strict=True):
        assert sum(ref() is not None for ref in alive) <= 1
        alive.append(weakref.ref(result))
        assert torch.equal(result, 0.5 * grad)
        assert result.dtype == grad.dtype


def test_zero_has_no_direction_and_no_norm() -> None:
    grad = torch.tensor([[0.0, 0.0], [0.0, -2.0]])
    assert norm(grad, "unit").flatten().tolist() == [0.0, 2.0]
    assert torch.equal(direction(grad, "unit"), torch.tensor([[0.0, 0.0], [0.0, -1.0]]))


def test_what_is_not_finite_shows() -> None:
    assert norm(torch.tensor([1.0, float("nan")]), "tensor").isnan().all()
    assert norm(torch.tensor([1.0, INF]), "tensor").item() == INF
    assert direction(torch.tensor([1.0, float("nan")]), "tensor").isnan().all()


def test_halves_are_summed_in_float32() -> None:
    ones = torch.ones(100_000, dtype=torch.bfloat16)
    assert norm(ones, "tensor", 1.0).item() == 100_000
    assert norm(ones, "tensor").dtype == mean(ones, "tensor").dtype == torch.float32
    assert widened(ones.double()).dtype == torch.float64


def test_the_gradient_of_a_norm_is_the_direction() -> None:
    grad = random(5).double().requires_grad_()
    norm(grad, "tensor").sum().backward()
    assert grad.grad is not None
    torch.testing.assert_close(grad.grad, direction(grad.detach(), "tensor"))


def _of_shards(ranks: Ranks, folder: Path) -> dict[tuple[float, float], tuple[float, int]]:
    """The norm of a vector of which each process has a part, and the number of its all-reduces."""
    count, found = ranks.count, {}
    for p in (1.0, 1.5, 2.0, 3.0, INF):
        for scale in (0.0, 1e-42, 1e-30, 1.0, 1e30, INF):
            part = torch.full((8,), scale).chunk(count)[ranks.rank]
            with (
                patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as calls,
                of_shards(cast(Any, distributed.group.WORLD)),
            ):
                found[p, scale] = norm(part, "tensor", p).item(), calls.call_count
    return found


def test_a_norm_over_shards_is_that_of_the_whole_with_one_all_reduce() -> None:
    for (p, scale), (size, num_calls) in in_ranks(3, _of_shards).items():
        expected = 0.0 if scale == 0 else torch.tensor(scale).item() * 8 ** (1 / p)
        assert math.isclose(size, expected, rel_tol=1e-3), (p, scale)
        assert num_calls == (2 if p == 3 else 1)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
