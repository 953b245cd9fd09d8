"""Which properties an aggregator has, and whether it keeps the rules that each must keep."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import get_args

from torch import Tensor

from gradsurg.aggregators.base import Aggregator, AggregatorProperty
from gradsurg.testing.aggregator_properties import PROPERTIES, Assertion
from gradsurg.testing.aggregator_rules import RULES, Plain, wide
from gradsurg.testing.matrices import examples, not_stationary
from gradsurg.testing.verdicts import Table, at, demanded, judged


def check_aggregator(
    aggregator: Aggregator | Callable[[Tensor], Tensor],
    *,
    declared: Collection[AggregatorProperty] | None = None,
    num_tasks: Sequence[int] = (1, 2, 3, 8),
    count: int = 30,
    max_columns: int = 10_000,
) -> Table:
    """Which properties hold on some known and `count` random matrices, and whether it keeps the
    rules: finite, pure, repeatable, the dtype kept, up to `max_columns` columns.

    A plain function of the rows (T x P) will do. `declared` takes the place of what an aggregator
    says of itself. Raises AssertionError, one line a fault, if a declared property does not hold or
    a rule is broken, TypeError for what is no aggregator, ValueError for an unknown property.
    """
    known = get_args(AggregatorProperty)
    unknown = sorted(set(declared or ()) - set(known))
    if unknown:
        raise ValueError(f"declared: must be of {', '.join(known)}, found {', '.join(unknown)}")
    if isinstance(aggregator, type) or not (
        isinstance(aggregator, Aggregator) or callable(aggregator)
    ):
        raise TypeError(f"check_aggregator takes an aggregator or a function, found {aggregator!r}")
    if not isinstance(aggregator, Aggregator):
        aggregator = Plain(aggregator, declared or ())
    promised = aggregator.properties if declared is None else frozenset(declared)
    tasks = _numbers(aggregator, num_tasks)
    rules = tuple(
        judged(name, True, partial(rule, aggregator, tasks))
        for name, rule in {**RULES, "wide": partial(wide, columns=max_columns)}.items()
    )
    verdicts = tuple(
        judged(name, name in promised, partial(_everywhere, name, check, aggregator, tasks, count))
        for name, check in PROPERTIES.items()
    )
    return demanded(Table(repr(aggregator), verdicts, rules))


def _numbers(aggregator: Aggregator, wanted: Sequence[int]) -> tuple[int, ...]:
    """Those of the wanted numbers of tasks that it takes."""
    if aggregator.num_tasks is not None:
        return (aggregator.num_tasks,)
    least = aggregator.least_tasks
    return tuple(number for number in wanted if number >= least) or (least, least + 2)


def _everywhere(
    name: AggregatorProperty,
    check: Assertion,
    aggregator: Aggregator,
    tasks: Sequence[int],
    count: int,
) -> None:
    family = not_stationary if name == "strongly_stationary" else examples
    remembers = bool(aggregator.init(tasks[0]))
    for index, example in enumerate(family(tasks, count)):
        with at(example.name):
            check(aggregator, example, remembers and index % 2 == 1)
