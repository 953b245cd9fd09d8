"""The properties of aggregators as assertions."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradsurg.aggregators.base import Aggregator, AggregatorContext, AggregatorProperty
from gradsurg.testing.matrices import Example, losses_for, names
from gradsurg.testing.verdicts import expect, written

EXACT = 1e-6
"""How far two results may differ, relative to their length."""
NOISE = 1e-9
"""And relative to the longest row: what cancels leaves that much rounding."""


def merged(aggregator: Aggregator, example: Example, past: bool, **changes: str | int) -> Tensor:
    """What it makes of an example, at first or after the calls before it."""
    tasks = len(example.rows)
    state = aggregator.init(tasks)
    calls = [*example.past, example.rows] if past else [example.rows]
    losses = example.losses if past else example.losses[-1:]
    result = calls[0]
    for step, (rows, own) in enumerate(zip(calls, losses, strict=True)):
        context = AggregatorContext(step=step, tasks=names(tasks), losses=own)
        for key, value in changes.items():
            setattr(context, key, value)
        with torch.no_grad():
            result, state = aggregator.merge(rows, state, context)
    return result


def _non_conflicting(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = merged(aggregator, example, past)
    norms = example.rows.norm(dim=1)
    least = -norms * (EXACT * result.norm() + 1e-3 * NOISE * norms.max())
    worst = int((example.rows @ result - least).argmin())
    product = example.rows[worst] @ result
    cosine = product / (norms[worst] * result.norm())
    text = f"{example.name}: the cosine of the result and row {worst} is {cosine:.3g}"
    expect(product >= least[worst], text)


def _permutation_invariant(aggregator: Aggregator, example: Example, past: bool) -> None:
    tasks = len(example.rows)
    result = merged(aggregator, example, past)
    orders = {tuple(range(tasks))[::-1], (*range(1, tasks), 0)}
    for order in sorted(orders):
        other = example.permuted(torch.tensor(order))
        expect_close(merged(aggregator, other, past), result, example, other.name)


def _linear_under_scaling(aggregator: Aggregator, example: Example, past: bool) -> None:
    tasks = len(example.rows)
    one, two = (10 ** (2 * losses_for(tasks, seed) / 3 - 1) for seed in (11, 12))
    parts = [merged(aggregator, example.scaled(factors), past) for factors in (one, two)]
    whole = merged(aggregator, example.scaled(2 * one + 0.5 * two), past)
    text = f"{example.name} with the rows times {written(one)} and {written(two)}"
    expect_close(whole, 2 * parts[0] + 0.5 * parts[1], example.scaled(10.0), text)


def _scale_invariant(aggregator: Aggregator, example: Example, past: bool) -> None:
    factors = 10 ** (losses_for(len(example.rows), 13) - 1.5)
    result = merged(aggregator, example, past)
    other = merged(aggregator, example.scaled(factors), past)
    if min(result.norm(), other.norm()) <= 1e-7 * example.rows.norm(dim=1).max():
        return  # no direction
    unit = result / result.norm()
    turned = (other / other.norm() - unit).norm()
    text = f"{example.name}: it turns by {turned:.3g} with the rows times {written(factors)}"
    expect(turned <= EXACT, text)


def _homogeneous(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = merged(aggregator, example, past)
    for factor in (0.125, 3.0, 2.0**16):
        found = merged(aggregator, example.scaled(factor), past) / factor
        expect_close(found, result, example, f"{example.name} times {factor:g}")


def _strongly_stationary(aggregator: Aggregator, example: Example, past: bool) -> None:
    size = merged(aggregator, example, past).norm() / example.rows.norm(dim=1).max()
    expect(size > NOISE, f"{example.name}: the result is zero, yet a direction helps")


def _deterministic(aggregator: Aggregator, example: Example, past: bool) -> None:
    result = merged(aggregator, example, past)
    for changes in ({"seed": 1}, {"group": "b"}):
        same = torch.equal(merged(aggregator, example, past, **changes), result)
        expect(same, f"{example.name}: another result with {changes}")


def expect_close(found: Tensor, expected: Tensor, example: Example, text: str) -> None:
    """Both are the same but for rounding."""
    length = (found.norm() + expected.norm()) / 2
    gap = (found - expected).norm()
    close = gap <= EXACT * length + NOISE * example.rows.norm(dim=1).max()
    expect(close, f"{text}: {written(found)} and not {written(expected)}, off by {gap:.3g}")


Assertion = Callable[[Aggregator, Example, bool], None]
PROPERTIES: dict[AggregatorProperty, Assertion] = {
    "non_conflicting": _non_conflicting,
    "permutation_invariant": _permutation_invariant,
    "linear_under_scaling": _linear_under_scaling,
    "scale_invariant": _scale_invariant,
    "homogeneous": _homogeneous,
    "strongly_stationary": _strongly_stationary,
    "deterministic": _deterministic,
}
