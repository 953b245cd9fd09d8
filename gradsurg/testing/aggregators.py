"""`check_aggregator`: test which properties an aggregator has and that it obeys all rules."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from typing import get_args

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
from gradsurg.torch_internals.autograd import version_of

RELATIVE_TOLERANCE = 1e-6
"""Allowed difference of two results, relative to their length."""
ROUNDING = 1e-9
"""Allowed difference relative to the longest row, as cancellation leaves rounding errors."""
NUM_PAST = 2
"""Calls before the one under test, for aggregators with state."""
SCALES = (1e-10, 1e-5, 1.0, 1e5, 1e10, 1e15)

KNOWN = (
    [[1.0]],
    [[0.0, 0.0]],
    [[1.0, 2.0], [3.0, -4.0]],
    [[1.0, 0.0], [0.0, 1.0]],
    [[1.0, 0.0], [-1.0, 0.0]],  # opposite
    [[1.0, 0.0], [-3.0, 0.0]],
    [[1.0, 2.0], [1.0, 2.0]],  # identical
    [[1.0, 2.0], [0.0, 0.0]],  # a zero row
    [[0.0, 0.0], [1.0, 2.0]],
    [[1.0, 0.1], [-1.0, 0.1]],  # nearly opposite
    [[30.0, 0.0], [-1.0, 0.1]],
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -1.0, 0.0]],
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    [[2.0, 0.0], [-0.5, 1.0], [-1.5, -1.0]],  # the sum is zero
    [[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],  # linearly dependent
)
"""Small matrices that every property is tested on before the random ones."""


def check_aggregator(
    aggregator: Aggregator | Callable[[Tensor], Tensor],
    *,
    declared: Collection[AggregatorProperty] | None = None,
    num_tasks: Sequence[int] = (1, 2, 3, 8),
    count: int = 30,
    max_columns: int = 10_000,
) -> Table:
    """Test an aggregator, or a plain function of the rows (T, P), on known and random matrices.

    Each property in `AggregatorProperty` is tested, on `count` random matrices. The rules require a
    finite result of the rows' dtype, no modification of the inputs, independence of the global
    random generator, up to `max_columns` columns, and more: the keys of `RULES`.

    `declared` replaces the properties that the aggregator declares. Raises AssertionError, with
    one line a fault, if a declared property does not hold or a rule is violated, TypeError if
    `aggregator` is neither an aggregator nor a function, ValueError for an unknown property.
    """
    names = get_args(AggregatorProperty)
    if isinstance(aggregator, type) or not callable(aggregator):
        raise TypeError(f"check_aggregator takes an aggregator or a function, found {aggregator!r}")
    if not isinstance(aggregator, Aggregator):
        aggregator = FunctionAggregator(aggregator, declared_among(names, declared, ()))
    properties = declared_among(names, declared, aggregator.properties)
    tasks = _supported(aggregator, num_tasks)
    checks = {key: partial(_check_all, key, aggregator, tasks, count) for key in PROPERTY_CHECKS}
    rules = {
        **{key: partial(_check_tasks, rule, aggregator, tasks) for key, rule in RULES.items()},
        "wide": partial(_wide, aggregator, tasks, max_columns),
    }
    return table_of(repr(aggregator), properties, checks, rules)


class FunctionAggregator(Aggregator):
    """A plain function of the rows as an aggregator with the given properties."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], declared: Collection[AggregatorProperty]
    ) -> None:
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


def _supported(aggregator: Aggregator, num_tasks: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of tasks among `num_tasks` that the aggregator supports."""
    if aggregator.num_tasks is not None:
        return (aggregator.num_tasks,)
    least = aggregator.least_tasks
    return tuple(number for number in num_tasks if number >= least) or (least, least + 2)


def _check_all(
    name: AggregatorProperty, aggregator: Aggregator, tasks: Sequence[int], count: int
) -> None:
    examples = _not_stationary if name == "strongly_stationary" else _examples
    has_state = bool(aggregator.init(tasks[0]))
    for index, example in enumerate(examples(tasks, count)):
        with failures_at(example.name):
            PROPERTY_CHECKS[name](aggregator, example, has_state and index % 2 == 1)


def _check_tasks(rule: "Rule", aggregator: Aggregator, tasks: Sequence[int]) -> None:
    for seed, number in enumerate(tasks):
        rule(aggregator, _normal_rows(number, 9, min(number, 9), seed))


@dataclass(frozen=True)
class Example:
    """Input of a property check: rows in float64, the rows of earlier calls, all calls' losses."""

    name: str
    rows: Tensor
    past: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]

    def scaled(self, factors: Tensor | float) -> "Example":
        """Return the example with `rows`, not `past`, times a number or one number a row."""
        return replace(self, rows=torch.as_tensor(factors).reshape(-1, 1) * self.rows)

    def permuted(self, order: Tensor) -> "Example":
        """Return the example with the tasks of all calls in another order."""
        return Example(
            f"{self.name} in the order {order.tolist()}",
            self.rows[order],
            tuple(rows[order] for rows in self.past),
            tuple(losses[order] for losses in self.losses),
        )


def _examples(num_tasks: Sequence[int], count: int) -> Iterator[Example]:
    """Yield the known matrices with a supported number of tasks, then `count` random ones."""
    for rows in KNOWN:
        if len(rows) in num_tasks:
            yield _example(str(rows), torch.tensor(rows, dtype=torch.float64), seed=0)
    for index in range(count):
        choice = Random(index)
        tasks = num_tasks[index % len(num_tasks)]
        size = choice.choice([1, 2, 3, 5, 20] if index < count // 2 else [5, 20, 60])
        rank = choice.randint(1, min(tasks, size))
        rows = _normal_rows(tasks, size, rank, index)
        name = f"normal rows {tasks} x {size} of rank {rank}, seed {index}"
        if index % 3 == 1:
            rows, name = _rescaled(rows, index), f"{name}, row scales 1e-3 to 1e3"
        if index % 5 == 4:
            rows, name = _stationary(rows, index), f"{name}, made to cancel"
        yield _example(name, rows, index)


def _not_stationary(num_tasks: Sequence[int], count: int) -> Iterator[Example]:
    """Yield rows that are not Pareto-stationary: J = u vᵀ + N with N v = 0, u >= 0, u != 0.

    The direction v decreases the loss of at least one task and increases none.
    """
    for example in _examples(num_tasks, 0):
        if any(_has_descent_axis(example.rows, sign) for sign in (1.0, -1.0)):
            yield example
    for index in range(count):
        tasks = num_tasks[index % len(num_tasks)]
        size = (2, 3, 5, 20)[index // len(num_tasks) % 4]
        generator = torch.Generator().manual_seed(1000 + index)
        v = _normal((size,), generator)
        v /= v.norm()
        rest = _normal((tasks, size), generator) * (0.0, 1.0, 10.0)[index % 3]
        if index % 2 and tasks > 2:
            rest[-1] = -rest[-2]
        rest -= (rest @ v)[:, None] * v
        u = 0.1 + torch.rand(tasks, generator=generator, dtype=torch.float64)
        if tasks > 1:
            # u > 0 for all tasks, for half of them, or for one.
            u[(tasks, -(-tasks // 2), 1)[index // 3 % 3] :] = 0
        name = f"rows {tasks} x {size} with a direction that harms none, seed {index}"
        yield _example(name, u[:, None] * v + rest, index)


def _normal_rows(tasks: int, size: int, rank: int, seed: int) -> Tensor:
    """Return random rows of a given rank, in float64."""
    generator = torch.Generator().manual_seed(seed)
    left, right = _normal((tasks, rank), generator), _normal((rank, size), generator)
    return left @ right / rank**0.5


def _rescaled(rows: Tensor, seed: int) -> Tensor:
    """Return the rows times random factors between 1e-3 and 1e3."""
    generator = torch.Generator().manual_seed(seed)
    powers = 6 * torch.rand(len(rows), generator=generator, dtype=torch.float64) - 3
    return 10 ** powers[:, None] * rows


def _stationary(rows: Tensor, seed: int) -> Tensor:
    """Return the rows with the last one replaced so that a positive combination is zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.1 + torch.rand(len(rows) - 1, 1, generator=generator, dtype=torch.float64)
    return torch.cat([rows[:-1], -(weights * rows[:-1]).sum(0, keepdim=True)])


def _losses(num_tasks: int, seed: int) -> Tensor:
    """Return random positive losses."""
    generator = torch.Generator().manual_seed(seed)
    return 0.1 + 3 * torch.rand(num_tasks, generator=generator, dtype=torch.float64)


def _names(num_tasks: int) -> tuple[str, ...]:
    return tuple(f"task{index}" for index in range(num_tasks))


def _example(name: str, rows: Tensor, seed: int) -> Example:
    tasks, size = rows.shape
    rank = min(tasks, size)
    past = tuple(_normal_rows(tasks, size, rank, seed + 100 + call) for call in range(NUM_PAST))
    losses = tuple(_losses(tasks, seed + call) for call in range(NUM_PAST + 1))
    return Example(name, rows, past, losses)


def _has_descent_axis(rows: Tensor, sign: float) -> bool:
    """Return whether ± a coordinate axis has products >= 0 with all rows and one > 0."""
    axes = sign * torch.eye(rows.shape[1], dtype=rows.dtype)
    products = [rows @ axis for axis in axes]
    return any(bool((product >= 0).all() and (product > 0).any()) for product in products)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _merged(aggregator: Aggregator, example: Example, past: bool, **changes: str | int) -> Tensor:
    """Return the result for an example, in a first call or after the calls `past`."""
    tasks = len(example.rows)
    state = aggregator.init(tasks)
    calls = [*example.past, example.rows] if past else [example.rows]
    losses = example.losses if past else example.losses[-1:]
    result = calls[0]
    for step, (rows, step_losses) in enumerate(zip(calls, losses, strict=True)):
        context = AggregatorContext(step=step, tasks=_names(tasks), losses=step_losses)
        for key, value in changes.items():
            setattr(context, key, value)
        with torch.no_grad():
            result, state = aggregator.merge(rows, state, context)
    return result


def _non_conflicting(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = _merged(aggregator, example, past)
    norms = example.rows.norm(dim=1)
    least = -norms * (RELATIVE_TOLERANCE * result.norm() + 1e-3 * ROUNDING * norms.max())
    worst = int((example.rows @ result - least).argmin())
    product = example.rows[worst] @ result
    cosine = product / (norms[worst] * result.norm())
    text = f"{example.name}: the cosine of the result and row {worst} is {cosine:.3g}"
    expect(product >= least[worst], text)


def _permutation_invariant(aggregator: Aggregator, example: Example, past: bool) -> None:
    tasks = len(example.rows)
    result = _merged(aggregator, example, past)
    orders = {tuple(range(tasks))[::-1], (*range(1, tasks), 0)}
    for order in sorted(orders):
        other = example.permuted(torch.tensor(order))
        _expect_close(_merged(aggregator, other, past), result, example, other.name)


def _linear_under_scaling(aggregator: Aggregator, example: Example, past: bool) -> None:
    tasks = len(example.rows)
    one, two = (10 ** (2 * _losses(tasks, seed) / 3 - 1) for seed in (11, 12))
    parts = [_merged(aggregator, example.scaled(factors), past) for factors in (one, two)]
    whole = _merged(aggregator, example.scaled(2 * one + 0.5 * two), past)
    text = f"{example.name} with the rows times {printed(one)} and {printed(two)}"
    _expect_close(whole, 2 * parts[0] + 0.5 * parts[1], example.scaled(10.0), text)


def _scale_invariant(aggregator: Aggregator, example: Example, past: bool) -> None:
    factors = 10 ** (_losses(len(example.rows), 13) - 1.5)
    result = _merged(aggregator, example, past)
    other = _merged(aggregator, example.scaled(factors), past)
    if min(result.norm(), other.norm()) <= 1e-7 * example.rows.norm(dim=1).max():
        return  # zero up to rounding: no direction to compare
    turned = (other / other.norm() - result / result.norm()).norm()
    text = f"{example.name}: it turns by {turned:.3g} with the rows times {printed(factors)}"
    expect(turned <= RELATIVE_TOLERANCE, text)


def _homogeneous(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = _merged(aggregator, example, past)
    for factor in (0.125, 3.0, 2.0**16):
        scaled = _merged(aggregator, example.scaled(factor), past) / factor
        _expect_close(scaled, result, example, f"{example.name} times {factor:g}")


def _strongly_stationary(aggregator: Aggregator, example: Example, past: bool) -> None:
    size = _merged(aggregator, example, past).norm() / example.rows.norm(dim=1).max()
    expect(
        size > ROUNDING,
        f"{example.name}: the result is zero, but a direction improves a task and harms none",
    )


def _deterministic(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = _merged(aggregator, example, past)
    for changes in ({"seed": 1}, {"group": "b"}):
        same = torch.equal(_merged(aggregator, example, past, **changes), result)
        expect(same, f"{example.name}: another result with {changes}")


def _expect_close(result: Tensor, expected: Tensor, example: Example, text: str) -> None:
    length = (result.norm() + expected.norm()) / 2
    gap = (result - expected).norm()
    allowed = RELATIVE_TOLERANCE * length + ROUNDING * example.rows.norm(dim=1).max()
    message = f"{text}: {printed(result)} and not {printed(expected)}, off by {gap:.3g}"
    expect(gap <= allowed, message)


PROPERTY_CHECKS: dict[AggregatorProperty, Callable[[Aggregator, Example, bool], None]] = {
    "non_conflicting": _non_conflicting,
    "permutation_invariant": _permutation_invariant,
    "linear_under_scaling": _linear_under_scaling,
    "scale_invariant": _scale_invariant,
    "homogeneous": _homogeneous,
    "strongly_stationary": _strongly_stationary,
    "deterministic": _deterministic,
}
"""Assertion of each property for one example, with (True) or without the calls before it."""


Rule = Callable[[Aggregator, Tensor], None]
"""Assertion of a rule for one number of tasks, on rows of normal entries (T, 9) in float64."""


def _finite(aggregator: Aggregator, rows: Tensor) -> None:
    number = len(rows)
    for size, rank in ((1, 1), (7, 1), (7, min(number, 7)), (40, number)):
        normal = _normal_rows(number, size, min(rank, size), seed=size)
        families = {
            "normal": normal,
            "zero": torch.zeros_like(normal),
            "equal": normal[:1].expand(number, size).contiguous(),
            "opposite": normal[:1] * (-1.0) ** torch.arange(number)[:, None],
            "stationary": _stationary(normal, seed=size),
            "mixed": _rescaled(normal, seed=size),
            "one of them zero": torch.cat([normal[:-1], torch.zeros_like(normal[:1])]),
        }
        for name, scale, dtype in product(families, SCALES, (torch.float32, torch.float64)):
            text = f"{name} rows {number} x {size} of {dtype}, scale {scale:g}"
            _expect_finite_row(aggregator, (families[name] * scale).to(dtype), text)


def _result_like_a_row(aggregator: Aggregator, rows: Tensor) -> None:
    for size, dtype in product((0, 1, 9), (torch.float32, torch.float64, torch.bfloat16)):
        text = f"rows {len(rows)} x {size} of {dtype}"
        _expect_finite_row(aggregator, rows[:, :size].to(dtype), text)


def _expect_finite_row(aggregator: Aggregator, rows: Tensor, text: str) -> None:
    with failures_at(text):
        result = _first_result(aggregator, rows)
    expect_like(result, rows[0], text)
    expect(result.isfinite().all(), f"{text}: {printed(result)}")


def _pure(aggregator: Aggregator, rows: Tensor) -> None:
    number = len(rows)
    state = aggregator.init(number)
    for step in range(3):
        rows = _normal_rows(number, 9, min(number, 9), seed=step)
        inputs = [rows, *state.values()]
        copies = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            result, after = aggregator.merge(rows, state, _context(number, step))
        for name, tensor, before in zip(("rows", *state), inputs, copies, strict=True):
            expect(torch.equal(tensor, before), f"writes into {name} at {number} tasks")
        expect(version_of(rows) == 0, f"writes into the rows at {number} tasks")
        expect_unshared(result, [rows], "the rows")
        expect_unshared(result, list(after.values()), "the state")
        known = {name: tensor for name, tensor in state.items() if tensor.numel()}
        same = {name: tensor for name, tensor in after.items() if name in known}
        expect(after.keys() == state.keys(), "the state changes its keys")
        expect_same_structure(known, same, "the state changes its form")
        state = after


def _no_autograd_graph(aggregator: Aggregator, rows: Tensor) -> None:
    context = _context(len(rows))
    # The losses of a model have a graph.
    context.losses = _losses(len(rows), 0).requires_grad_() * 1.0
    result = aggregator(rows.clone().requires_grad_(), context)
    expect(not result.requires_grad, "the result is part of a graph")
    _, state = aggregator.merge(rows, aggregator.init(len(rows)), context)
    for key, value in state.items():
        expect(not value.requires_grad, f"'{key}' of the state is part of a graph")


def _no_global_rng(aggregator: Aggregator, rows: Tensor) -> None:
    expect_generator_untouched(partial(_first_result, aggregator, rows))


def _any_memory_layout(aggregator: Aggregator, rows: Tensor) -> None:
    column_major = _first_result(aggregator, rows.t().contiguous().t())
    gap = (column_major - _first_result(aggregator, rows)).abs().max()
    expect(gap <= 1e-9 * rows.abs().max(), f"off by {gap:.3g} for column-major rows")


def _propagates_nan(aggregator: Aggregator, rows: Tensor) -> None:
    """A NaN in a row is a NaN in the same column of the result, or raises ValueError."""
    for task in {0, len(rows) - 1}:
        spoilt = rows.clone()
        spoilt[task, 3] = torch.nan
        try:
            result = _first_result(aggregator, spoilt)
        except ValueError:
            continue
        text = f"{len(rows)} tasks with a NaN in row {task}: {printed(result)}"
        expect(result[3].isnan(), f"{text} has none there")


def _float64_weights(aggregator: Aggregator, rows: Tensor) -> None:
    number = len(rows)
    match aggregator:
        case GramianAggregator():
            state = aggregator.init(number)
            weights, _ = aggregator.update(rows @ rows.T, state, _context(number))
        case LossWeighting():
            weights, _ = aggregator.weigh(number, aggregator.init(number), _context(number))
        case _:
            return
    expect_like(weights, torch.empty(number, dtype=torch.float64), f"{number} weights")


def _any_column_block(aggregator: Aggregator, rows: Tensor) -> None:
    """An entrywise aggregator gives the same for a block of columns and for all of them."""
    if not isinstance(aggregator, Entrywise):
        return
    rows = _normal_rows(len(rows), 40_000, min(len(rows), 9), seed=7)
    whole = _first_result(aggregator, rows)
    for start, stop in ((0, 1), (5, 900), (32_000, 40_000)):
        context = _context(len(rows))
        context.start = start
        block = aggregator.apply(rows[:, start:stop], context)
        gap = (block - whole[start:stop]).abs().max()
        text = f"columns {start} to {stop} alone are off by {gap:.3g}"
        expect(gap <= 1e-9 * rows.abs().max(), text)


def _value_semantics(aggregator: Aggregator, rows: Tensor) -> None:
    if not isinstance(aggregator, FunctionAggregator):
        expect_value_semantics(aggregator)


def _wide(aggregator: Aggregator, tasks: Sequence[int], columns: int) -> None:
    number = 2 if 2 in tasks else tasks[0]
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(number, columns, generator=generator)
    for scale in (1e15, 1e-25):
        rows *= scale
        _expect_finite_row(aggregator, rows, f"{columns} columns, scale {scale:g}")


RULES: dict[str, Rule] = {
    "finite": _finite,
    "result_like_a_row": _result_like_a_row,
    "pure": _pure,
    "no_autograd_graph": _no_autograd_graph,
    "no_global_rng": _no_global_rng,
    "any_memory_layout": _any_memory_layout,
    "propagates_nan": _propagates_nan,
    "float64_weights": _float64_weights,
    "any_column_block": _any_column_block,
    "value_semantics": _value_semantics,
}
"""Rules that every aggregator must obey."""


def _first_result(aggregator: Aggregator, rows: Tensor) -> Tensor:
    return aggregator(rows, _context(len(rows)))


def _context(num_tasks: int, step: int = 0) -> AggregatorContext:
    return AggregatorContext(step=step, tasks=_names(num_tasks), losses=_losses(num_tasks, step))
