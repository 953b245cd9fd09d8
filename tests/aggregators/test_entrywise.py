"""Entrywise aggregators draw as published, and give the same result in pieces of any size."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators import grad_drop
from gradsurg.aggregators.base import AggregatorContext
from gradsurg.plugins.fields import FieldError


def some_rows(num_tasks: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(num_tasks)
    return torch.randn(num_tasks, size, generator=generator, dtype=torch.float64).to(dtype)


def published(rows: Tensor, chance: Tensor, leak: Tensor) -> Tensor:
    """Lines 10 to 15 of algorithm 1 of the paper, task by task."""
    purity = 0.5 * (1 + rows.sum(0) / rows.abs().sum(0))
    result = torch.zeros_like(rows[0])
    for row, share in zip(rows, leak, strict=True):
        mask = (purity > chance) * (row > 0) + (purity < chance) * (row < 0)
        result += (share + (1 - share) * mask) * row
    return result


@pytest.mark.parametrize("leak", [0.0, 0.3, 1.0, (0.0, 0.25, 1.0)])
def test_grad_drop_equals_the_formula_of_the_paper(leak: float | tuple[float, ...]) -> None:
    rows, context = some_rows(3, 5000), AggregatorContext(seed=4, group="a", step=7)
    chance = grad_drop._uniform(5000, 5000, context.generator()).double()
    shares = torch.tensor(leak, dtype=torch.float64).expand(3)
    expected = published(rows, 1 - chance, shares)
    torch.testing.assert_close(gs.GradDrop(leak=leak).apply(rows, context), expected)


def test_grad_drop_keeps_the_positive_sign_with_the_right_probability() -> None:
    columns = 200_000
    rows = torch.tensor([[3.0], [-1.0]]).expand(2, columns)
    share = (gs.GradDrop()(rows) == 3).double().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / columns) ** 0.5


def test_grad_drop_draws_independent_uniform_numbers() -> None:
    drawn = grad_drop._uniform(1 << 18, 200_001, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    assert len(drawn) == 200_001
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    shares = torch.histc(drawn, bins=64, min=0, max=1) / len(drawn)
    assert (shares - 1 / 64).abs().max() < 5 * (1 / 64 / len(drawn)) ** 0.5
    for apart in (1, 2):
        pairs = torch.stack([drawn[apart:], drawn[:-apart]]).double()
        assert abs(torch.corrcoef(pairs)[0, 1]) < 5 / len(drawn) ** 0.5
    fewer = grad_drop._uniform(1 << 18, 1001, torch.Generator().manual_seed(0))
    assert torch.equal(fewer, drawn[:1001])


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-24])
def test_grad_drop_keeps_an_entry_whose_signs_agree_for_every_draw(
    monkeypatch: pytest.MonkeyPatch, chance: float
) -> None:
    monkeypatch.setattr(grad_drop, "_uniform", lambda _, count, __: torch.full((count,), chance))
    rows = torch.tensor([[1.0, -1.0, 1e-30, -1e-30, 0.0], [2.0, -2.0, 0.0, 0.0, 0.0]])
    assert torch.equal(gs.GradDrop()(rows), rows.sum(0))


def test_grad_drop_draws_anew_for_each_seed_group_step_and_block() -> None:
    block = grad_drop.ENTRIES // 2
    rows = torch.tensor([[1.0], [-1.0]]).expand(2, 3 * block)
    first = gs.GradDrop()(rows)
    for context in (
        AggregatorContext(seed=1),
        AggregatorContext(group="b"),
        AggregatorContext(step=1),
    ):
        assert not torch.equal(gs.GradDrop()(rows, context), first)
    blocks = first.split(block)
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])


def test_grad_drop_removes_the_dropped_sign_without_rounding_error() -> None:
    rows = torch.tensor([[1e30, 1e-30], [-1e-8, -2e-38]])
    result = torch.stack([gs.GradDrop()(rows, AggregatorContext(seed=seed)) for seed in range(20)])
    assert set(result[:, 0].tolist()) <= set(rows[:, 0].tolist())
    assert set(result[:, 1].tolist()) <= set(rows[:, 1].tolist())


def test_an_entry_whose_signs_agree_is_never_dropped() -> None:
    rows = torch.cat([torch.ones(1, 500_000), -torch.ones(1, 500_000)], dim=1)
    for scale in (1e-37, 1e-10, 1.0, 1e15):
        assert torch.equal(gs.GradDrop()(rows * scale), (rows * scale)[0])


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 4, 7, 10, 25])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.2, 0.28, 0.5])
def test_a_trimmed_mean_equals_the_mean_of_the_sorted_values(num_tasks: int, beta: float) -> None:
    rows = some_rows(num_tasks, 50)
    trimmed = min(math.ceil(round(beta * num_tasks, 9)), (num_tasks - 1) // 2)
    expected = rows.sort(0).values[trimmed : num_tasks - trimmed].mean(0)
    torch.testing.assert_close(gs.TrimmedMean(beta=beta)(rows), expected)


def test_a_huge_value_leaves_no_rounding_error_in_a_trimmed_mean() -> None:
    rows = some_rows(5, 40, torch.float32)
    rows[3] = 1e30
    rows[0, 7:] = -1e30
    assert gs.TrimmedMean()(rows).abs().max() < 10


def test_random_weights_are_a_softmax_of_normal_numbers() -> None:
    weights = torch.stack(
        [gs.Random()(torch.eye(2), AggregatorContext(seed=seed)) for seed in range(4000)]
    )
    logits = weights[:, 0].log() - weights[:, 1].log()  # the difference of two: variance 2
    assert abs(logits.var() - 2) < 0.2


@pytest.mark.parametrize(
    ("aggregator", "message"),
    [
        (gs.FixedWeights((1.0, 2.0, 3.0)), "found 3 weights for 2 tasks"),
        (gs.GradDrop(leak=(0.0, 0.1, 0.2)), "found 3 numbers for 2 tasks"),
    ],
)
def test_a_wrong_number_of_weights_or_leaks_is_refused(
    aggregator: gs.FixedWeights | gs.GradDrop, message: str
) -> None:
    assert aggregator.num_tasks == 3
    with pytest.raises(ValueError, match=message):
        aggregator(torch.eye(2))


def test_weights_by_name_apply_to_their_tasks_in_any_order() -> None:
    named = gs.FixedWeights({"a": 2.0, "b": -1.0})
    assert named == gs.FixedWeights((2.0, -1.0), tasks=("a", "b"))
    assert (named.num_tasks, named.weights, named.tasks) == (2, (2.0, -1.0), ("a", "b"))
    rows = torch.eye(2)
    assert named(rows, AggregatorContext(tasks=("a", "b"))).tolist() == [2.0, -1.0]
    assert named(rows, AggregatorContext(tasks=("b", "a"))).tolist() == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((), "are by task name, and the call has no task names"),
        (("a", "c"), "there is no task 'b'. There are: a, c."),
        (("a", "b", "c"), "task 'c' has none, found a, b"),
    ],
)
def test_weights_by_name_refuse_other_tasks_by_name(tasks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^FixedWeights.weights: {message}"):
        gs.FixedWeights({"a": 2.0, "b": -1.0})(
            torch.eye(len(tasks) or 2), AggregatorContext(tasks=tasks)
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": {"a": True}}, "weights.a: must be a number, found True"),
        ({"weights": {"a": float("nan")}}, "weights.a: must be finite, found nan"),
        (
            {"weights": 3},
            "weights: must be a list, or a mapping with a number for each task, found 3",
        ),
        ({"weights": {}}, "weights: must have at least 1 item"),
        ({"weights": {"a": 1.0}, "tasks": ["a"]}, "tasks: must be empty if weights are given by"),
        ({"weights": [1.0, 2.0], "tasks": ["a"]}, "tasks: must be one name for each weight"),
        (
            {"weights": [1.0, 2.0], "tasks": ["a", "a"]},
            "tasks: must name each task once, found a, a",
        ),
        (
            {"weights": [1.0, 2.0], "tasks": ["a", "a", "b"]},
            "tasks: must name each task once, found",
        ),
        (
            {"weights": [1.0, 2.0], "tasks": ["a", "b", "c"]},
            "tasks: must be one name for each weight",
        ),
        (
            {"weights": None, "tasks": ["a"]},
            "tasks: must be one name for each weight, found a for 0",
        ),
    ],
)
def test_wrong_weights_by_name_are_refused(
    fields: dict[str, Any],  # Any: wrong in many ways
    message: str,
) -> None:
    with pytest.raises(FieldError, match=f"FixedWeights.{message}"):
        gs.FixedWeights(**fields)


def test_weights_of_none_are_one_for_each_task() -> None:
    for number in (1, 2, 5):
        assert gs.FixedWeights(None)(torch.eye(number)).tolist() == [1.0] * number
    assert gs.FixedWeights(None).num_tasks is None
