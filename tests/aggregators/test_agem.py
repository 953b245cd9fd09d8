"""AGEM beside the formula of the paper, on the gradients themselves, and at the edges."""

import numpy as np
import pytest
import torch

from gradsurg.aggregators.agem import AGEM
from tests.aggregators.inputs import distance, rows

PAIRS = [
    rows(2, 2, ratio, seed, lean)
    for ratio in (1.0, 1e3)
    for seed in range(20)
    for lean in (0.0, 1.0)
]


def slow(matrix: np.ndarray) -> np.ndarray:
    g, g_ref = matrix
    if g @ g_ref >= 0:
        return g
    return g - (g @ g_ref) / (g_ref @ g_ref) * g_ref


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_agem_equals_the_formula_of_the_paper(order: tuple[int, int]) -> None:
    conflicts = 0
    for matrix in PAIRS:
        pair = matrix[list(order)]
        conflicts += pair[0] @ pair[1] < 0
        assert distance(AGEM()(torch.from_numpy(pair)).numpy(), slow(pair)) < 1e-9
    assert 5 < conflicts < len(PAIRS) - 5


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e15])
def test_a_conflicting_gradient_becomes_orthogonal_to_the_memory(scale: float) -> None:
    for matrix in PAIRS:
        given = torch.from_numpy(matrix * scale)
        if (given[0] @ given[1]) < 0:
            left = AGEM()(given)
            assert left.norm() > 0
            assert abs(left @ given[1]) <= 1e-9 * left.norm() * given[1].norm()
            assert left @ given[0] > 0


def test_the_gradient_of_the_memory_is_not_added() -> None:
    g = torch.tensor([1.0, 0.0])
    for g_ref in ([5.0, 3.0], [0.0, 7.0], [0.0, 0.0]):
        assert torch.equal(AGEM()(torch.stack([g, torch.tensor(g_ref)])), g)
    assert not AGEM()(torch.tensor([[0.0, 0.0], [1.0, 2.0]])).any()


def test_opposite_gradients_cancel_and_a_single_one_is_unchanged() -> None:
    g = torch.tensor([3.0, -1.0, 2.0])
    for ratio in (0.5, 1.0, 4.0):
        assert AGEM()(torch.stack([g, -ratio * g])).norm() < 1e-6
    assert torch.equal(AGEM()(g[None]), g)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("task", [0, 1])
def test_a_number_that_is_not_finite_makes_every_weight_nan(bad: float, task: int) -> None:
    given = torch.ones(2, 3)
    given[task, 1] = bad
    assert AGEM().weights(given.double() @ given.double().T).isnan().all()
    assert AGEM()(given).isnan().all()


def test_more_than_two_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="AGEM needs two tasks, the current data and .* 3$"):
        AGEM()(torch.eye(3))
