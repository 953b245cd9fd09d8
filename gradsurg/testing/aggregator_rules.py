"""The rules that every aggregator must keep, whatever it does."""

import copy
import pickle
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    Entrywise,
    GramianAggregator,
    LossWeighting,
)
from gradsurg.testing.matrices import losses_for, mixed, names, normal, stationary
from gradsurg.testing.verdicts import (
    at,
    expect,
    expect_generator_untouched,
    expect_like,
    expect_same_structure,
    expect_unshared,
    written,
)

SCALES = (1e-10, 1e-5, 1.0, 1e5, 1e10, 1e15)


class Plain(Aggregator):
    """A plain function of the rows as an aggregator, with the properties it is said to have."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], declared: Collection[AggregatorProperty]
    ):
        self.function = function
        self.declared = frozenset(declared)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return self.declared

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.function(rows), state


def _finite(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        for size, rank in ((1, 1), (7, 1), (7, min(number, 7)), (40, number)):
            rows = normal(number, size, min(rank, size), seed=size)
            families = {
                "normal": rows,
                "zero": torch.zeros_like(rows),
                "equal": rows[:1].expand(number, size).contiguous(),
                "opposite": rows[:1] * (-1.0) ** torch.arange(number)[:, None],
                "stationary": stationary(rows, seed=size),
                "mixed": mixed(rows, seed=size),
                "one of them zero": torch.cat([rows[:-1], torch.zeros_like(rows[:1])]),
            }
            for name, family in families.items():
                for scale in SCALES:
                    for dtype in (torch.float32, torch.float64):
                        given = (family * scale).to(dtype)
                        text = f"{name} rows {number} x {size} of {dtype}, scale {scale:g}"
                        with at(text):
                            result = _once(aggregator, given)
                        expect_like(result, given[0], text)
                        expect(result.isfinite().all(), f"{text}: {written(result)}")


def _like_a_row(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        for size in (0, 1, 9):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                rows = normal(number, max(size, 1), 1, seed=1)[:, :size].to(dtype)
                text = f"rows {number} x {size} of {dtype}"
                with at(text):
                    result = _once(aggregator, rows)
                expect_like(result, rows[0], text)
                expect(result.isfinite().all(), f"{text}: {written(result)}")


def _pure(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        state = aggregator.init(number)
        for step in range(3):
            rows = normal(number, 9, min(number, 9), seed=step)
            given = [rows, *state.values()]
            before = [tensor.clone() for tensor in given]
            with torch.no_grad():
                result, after = aggregator.merge(rows, state, _context(number, step))
            for name, one, two in zip(("rows", *state), given, before, strict=True):
                expect(torch.equal(one, two), f"writes into {name} at {number} tasks")
            expect(rows._version == 0, f"writes into the rows at {number} tasks")
            expect_unshared(result, [rows], "the rows")
            expect_unshared(result, list(after.values()), "the state")
            expect_same_structure(state, after, "the state changes its form")
            state = after


def _no_graph(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        rows = normal(number, 9, min(number, 9), seed=2).requires_grad_()
        context = _context(number)
        # As they come from a model: each is the end of a graph.
        context.losses = losses_for(number, 0).requires_grad_() * 1.0
        result = aggregator(rows, context)
        expect(not result.requires_grad, "the result is part of a graph")
        _, state = aggregator.merge(rows.detach(), aggregator.init(number), context)
        for key, value in state.items():
            expect(not value.requires_grad, f"'{key}' of the state is part of a graph")


def _no_global_random_numbers(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        rows = normal(number, 9, min(number, 9), seed=3)
        expect_generator_untouched(partial(_once, aggregator, rows))


def _any_layout(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        rows = normal(number, 9, min(number, 9), seed=4)
        turned = _once(aggregator, rows.t().contiguous().t())
        gap = (turned - _once(aggregator, rows)).abs().max()
        expect(gap <= 1e-9 * rows.abs().max(), f"off by {gap:.3g} if the rows lie in columns")


def _nan_is_told(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        for task in {0, number - 1}:
            rows = normal(number, 5, 1, seed=5)
            rows[task, 3] = torch.nan
            try:
                result = _once(aggregator, rows)
            except ValueError:
                continue  # refused, which is as good
            text = f"{number} tasks with a NaN in row {task}: {written(result)}"
            expect(result[3].isnan(), f"{text} has none there")


def _weights(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for number in tasks:
        rows = normal(number, 9, min(number, 9), seed=6)
        state = aggregator.init(number)
        match aggregator:
            case GramianAggregator():
                weights, _ = aggregator.update(rows @ rows.T, state, _context(number))
            case LossWeighting():
                weights, _ = aggregator.weigh(number, state, _context(number))
            case _:
                return
        expect_like(weights, torch.empty(number, dtype=torch.float64), f"{number} weights")


def _any_pieces(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    if not isinstance(aggregator, Entrywise):
        return
    for number in tasks:
        rows = normal(number, 40_000, min(number, 9), seed=7)
        whole = _once(aggregator, rows)
        for start, stop in ((0, 1), (5, 900), (32_000, 40_000)):
            context = _context(number)
            context.start = start
            gap = (aggregator.apply(rows[:, start:stop], context) - whole[start:stop]).abs().max()
            text = f"columns {start} to {stop} alone are off by {gap:.3g}"
            expect(gap <= 1e-9 * rows.abs().max(), text)


def _a_value(aggregator: Aggregator, tasks: Sequence[int]) -> None:
    if isinstance(aggregator, Plain):
        return
    for twin in (copy.deepcopy(aggregator), pickle.loads(pickle.dumps(aggregator))):
        expect(twin == aggregator, "a copy is not equal to it")
        expect(hash(twin) == hash(aggregator), "a copy has another hash")
        expect(repr(twin) == repr(aggregator), "a copy is written in another way")


def wide(aggregator: Aggregator, tasks: Sequence[int], columns: int) -> None:
    number = 2 if 2 in tasks else tasks[0]
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(number, columns, generator=generator)
    for scale in (1e15, 1e-25):
        rows *= scale
        result = _once(aggregator, rows)
        expect_like(result, rows[0], f"{columns} columns")
        expect(result.isfinite().all(), f"{columns} columns, scale {scale:g}: not finite")


RULES: dict[str, Callable[[Aggregator, Sequence[int]], None]] = {
    "finite": _finite,
    "like_a_row": _like_a_row,
    "pure": _pure,
    "no_graph": _no_graph,
    "no_global_random_numbers": _no_global_random_numbers,
    "any_layout": _any_layout,
    "nan_is_told": _nan_is_told,
    "weights_of_float64": _weights,
    "any_pieces": _any_pieces,
    "a_value": _a_value,
}
"""What every aggregator must keep."""


def _once(aggregator: Aggregator, rows: Tensor) -> Tensor:
    return aggregator(rows, _context(len(rows)))


def _context(num_tasks: int, step: int = 0) -> AggregatorContext:
    return AggregatorContext(step=step, tasks=names(num_tasks), losses=losses_for(num_tasks, step))
