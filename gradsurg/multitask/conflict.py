"""Measure how much the gradients of several tasks conflict, from their Gramian."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import inf, isfinite, nan
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import (
    MEANS,
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    LossWeighting,
)
from gradsurg.effects.numbers import CONFLICT_NAMES, CONFLICT_NUMBERS, CONFLICT_TASK_NAMES
from gradsurg.effects.summary import AUTO, MAX_SITES, SITES
from gradsurg.effects.tables import aligned
from gradsurg.plugins.registry import find, names
from gradsurg.torch_internals.autograd import without_autocast

MAX_UNFETCHED = 1000  # conflicts kept until they are fetched
BATCH = 50  # measurements evaluated together
MAX_MEANS = 20  # combinations of a group and its tasks for which means are kept
IN_TABLE = ("conflict_rate", "norm_spread", "cosine_to_mean", "norm_to_mean")

WeightAggregator = GramianAggregator | LossWeighting

EQUIVALENTS = {"dwa": "sum", "fair_grad": "nash_mtl", "grad_norm": "sum", "grad_vac": "pcgrad"}
"""Aggregators that at a first step, with default fields, nearly always equal a cheaper one."""


@dataclass(frozen=True)
class Alternative:
    """The update of another aggregator: its weights, and its cosine to the update in use."""

    weights: list[float]
    cosine: float


@dataclass(frozen=True)
class Conflict:
    """The gradients g_i of one group at one step, and the update d computed from them.

    Undefined numbers are NaN.

    Attributes:
        norms: |g_i| of each task.
        cosines: The matrix of the cosines of all pairs.
        conflict_rate: The share of pairs with a cosine below zero.
        norm_spread: The largest norm over the smallest nonzero norm.
        condition: The condition number of the matrix of cosines.
        weights: The w of d = sum w_i g_i, empty for updates without weights.
        decrease: g_i . d, the first-order decrease of each loss for a step with learning rate 1.
        cosine_to_mean: The cosine of d to the mean of the gradients.
        norm_to_mean: The norm of d over the norm of the mean.
        weight_entropy: The entropy of |w|, from 0 for one task alone to 1 for equal weights.
        fallbacks: The number of updates of the group so far that are less exact or were skipped.
        others: The updates of other aggregators.
    """

    step: int
    aggregator: str
    group: str
    tasks: list[str]
    norms: list[float]
    cosines: list[list[float]]
    conflict_rate: float
    norm_spread: float
    condition: float
    weights: list[float]
    decrease: list[float]
    cosine_to_mean: float
    norm_to_mean: float
    weight_entropy: float
    fallbacks: int
    others: dict[str, Alternative] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """Return all fields as a dict that can be written as JSON."""
        return {
            **vars(self),
            "others": {name: dict(vars(other)) for name, other in self.others.items()},
        }


def numbers(
    rows: Iterable[Mapping[str, Any]], others: bool = True, log: str = AUTO
) -> dict[str, float]:
    """Return the finite numbers of the last row of each group, by logged path.

    For an aggregator with more than MAX_SITES groups these are the means over the groups, as the
    group `mean`, unless `log="sites"`. Without `others`, the aggregators that were not used are
    left out. Any: the values of a row are whatever JSON can hold.
    """
    paths: dict[tuple[str, str, str, str], object] = {}
    groups: dict[str, set[str]] = {}
    for row in rows:
        tasks = row["tasks"]
        of_group = {name: row.get(name) for name in CONFLICT_NAMES}
        for name in CONFLICT_TASK_NAMES:
            path = name.rstrip("s")
            of_group |= {
                f"{path}/{task}": value for task, value in zip(tasks, row[name], strict=False)
            }
        for first, name in enumerate(tasks):
            for second in range(first):
                of_group[f"cosine/{tasks[second]}~{name}"] = row["cosines"][first][second]
        beside = row["others"] if others else {}
        of_group |= {f"cosine_to/{name}": other["cosine"] for name, other in beside.items()}
        place = row["aggregator"], row["group"]
        groups.setdefault(place[0], set()).add(place[1])
        paths |= {("conflict", *place, name): number for name, number in of_group.items()}
        for name, other in beside.items():
            for task, weight in zip(tasks, other["weights"], strict=True):
                paths["others", *place, f"{name}/weight/{task}"] = weight
    columns: dict[str, list[float]] = {}
    for (kind, aggregator, group, name), number in paths.items():
        if isinstance(number, int | float) and isfinite(number):
            is_mean = log != SITES and len(groups[aggregator]) > MAX_SITES
            path = f"{kind}/{aggregator}/{'mean' if is_mean else group}/{name}"
            columns.setdefault(path, []).append(number)
    return {path: fmean(column) for path, column in columns.items()}


@dataclass(frozen=True)
class Measurement:
    """The Gramian of the gradients g_i of a group, and the update d that an aggregator computed.

    `label` names the intervention, `aggregator` the method. `weights` are the w of d = sum w_i g_i,
    None for updates without weights; `products` are g_i . d and `norm` is |d|. `fallbacks` is the
    same as in `Conflict`.
    """

    label: str
    aggregator: str
    context: AggregatorContext
    gramian: Tensor
    weights: Tensor | None
    products: Tensor
    norm: float
    fallbacks: int = 0


def conflict_of(measurement: Measurement) -> Conflict:
    """Compute the numbers of a measurement, without the updates of other aggregators."""
    g, weights, products = (
        measurement.gramian.numpy(),
        measurement.weights,
        measurement.products,
    )
    norms = np.sqrt(np.diagonal(g))
    with np.errstate(all="ignore"):
        cosines = _cosines(g, norms)
    pairs = cosines[_lower_triangle(len(g))]
    nonzero = norms[norms != 0]
    mean_norm = float(np.sqrt(max(g.mean(), 0.0)))
    return Conflict(
        step=measurement.context.step,
        aggregator=measurement.label,
        group=measurement.context.group,
        tasks=list(measurement.context.tasks),
        norms=norms.tolist(),
        cosines=cosines.tolist(),
        conflict_rate=_conflict_rate(pairs),
        norm_spread=_ratio(float(nonzero.max()), float(nonzero.min())) if len(nonzero) else nan,
        condition=_condition(cosines),
        weights=[] if weights is None else weights.tolist(),
        decrease=products.tolist(),
        cosine_to_mean=_ratio(float(products.mean()), measurement.norm * mean_norm),
        norm_to_mean=_ratio(measurement.norm, mean_norm),
        weight_entropy=nan if weights is None else _entropy(weights.numpy()),
        fallbacks=measurement.fallbacks,
    )


@cache
def _lower_triangle(count: int) -> np.ndarray:
    """Return a mask with each pair of tasks once."""
    return np.tri(count, k=-1, dtype=bool)


def _cosines(g: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs: 0 for a zero gradient, NaN if one is not finite."""
    safe = np.where(norms == 0, 1.0, norms)
    cosines = np.clip(g / np.outer(safe, safe), -1.0, 1.0)
    np.fill_diagonal(cosines, np.where(norms == 0, 0.0, np.where(np.isfinite(norms), 1.0, nan)))
    return cosines


def _conflict_rate(pairs: np.ndarray) -> float:
    """Return the share of the finite cosines that are negative."""
    finite = np.count_nonzero(np.isfinite(pairs))
    if not finite:
        return nan if len(pairs) else 0.0
    return float(np.count_nonzero(pairs < 0) / finite)


def _condition(cosines: np.ndarray) -> float:
    if not np.isfinite(cosines).all():
        return nan
    values = np.linalg.eigvalsh(cosines)
    least = values[0]
    return float(values[-1] / least) if least > 1e-15 * len(values) else inf


def _entropy(weights: np.ndarray) -> float:
    total = np.abs(weights).sum()
    if len(weights) < 2 or not np.isfinite(total) or total == 0:
        return nan
    shares = np.abs(weights) / total
    shares = shares[shares > 0]
    return abs(float((shares * np.log(shares)).sum() / np.log(len(weights))))


def _ratio(number: float, by: float) -> float:
    """Return the ratio, NaN if the divisor is not positive and finite."""
    return number / by if 0 < by < inf else nan


class Conflicts:
    """The conflicts of the sampled steps: those since the last `fetch`, and means over all of them.

    Evaluating one measurement inside a step is slow, with cold caches. So measurements are queued
    and evaluated `BATCH` at a time, and other aggregators only on `fetch`.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[Measurement, bool]] = []
        self._unfetched: deque[tuple[Conflict, Measurement | None]] = deque(maxlen=MAX_UNFETCHED)
        self._means: dict[tuple[str, str, tuple[str, ...]], _RunningMeans] = {}
        self._without_means = 0  # conflicts of further sets of tasks

    def add(self, measurement: Measurement, compare: bool = True) -> None:
        """Queue one measurement; `compare` also evaluates the other aggregators on it."""
        self._queue.append((measurement, compare))
        if len(self._queue) == BATCH:
            self._evaluate()

    def fetch(self) -> list[Conflict]:
        """Return the conflicts since the last fetch, at most the newest thousand."""
        self._evaluate()
        compared = [measurement for _, measurement in self._unfetched if measurement is not None]
        with without_autocast(()):
            others = iter(alternatives(compared))
        conflicts = [
            conflict if measurement is None else replace(conflict, others=next(others))
            for conflict, measurement in self._unfetched
        ]
        self._unfetched.clear()
        return conflicts

    def numbers(self, others: bool = False, log: str = AUTO) -> dict[str, float]:
        """Return the newest conflict of each group since the last call, or `fetch`.

        With more than 12 groups it is their mean, as the group `mean`, unless `log="sites"`. The
        keys are `conflict/<aggregator>/<group>/<number>`; numbers without a value are left out.
        `others` adds the update of each other aggregator: its cosine to the one used,
        `conflict/<aggregator>/<group>/cosine_to/<other>`, and its weights,
        `others/<aggregator>/<group>/<other>/weight/<task>`.
        """
        rows = (conflict.row() for conflict in self.fetch())
        return numbers(rows, others, log)

    def table(self) -> str:
        """Return a table for each group: means over the sampled steps, one line a task."""
        self._evaluate()
        parts = [means.table(*key) for key, means in self._means.items()]
        if self._without_means:
            parts.append(f"{self._without_means} conflicts of further tasks are not in these means")
        return "\n\n".join(parts) or "no conflict was measured"

    def _evaluate(self) -> None:
        """Compute the conflicts of all queued measurements."""
        queue, self._queue = self._queue, []
        for measurement, compare in queue:
            conflict = conflict_of(measurement)
            self._unfetched.append((conflict, measurement if compare else None))
            key = conflict.aggregator, conflict.group, tuple(conflict.tasks)
            if key not in self._means and len(self._means) == MAX_MEANS:
                self._without_means += 1
            else:
                self._means.setdefault(key, _RunningMeans()).add(conflict)


class _RunningMeans:
    """Means over the sampled steps of one group."""

    def __init__(self) -> None:
        self.count = 0
        self.nonfinite = 0  # steps at which a gradient was not finite
        self.has_weights = False
        self.sums: Any = 0.0  # Any: arrays from the first conflict on
        self.finite: Any = 0  # for each number, the steps at which it was finite

    def add(self, conflict: Conflict) -> None:
        self.count += 1
        self.nonfinite += not all(map(isfinite, conflict.norms))
        self.has_weights |= bool(conflict.weights)
        weights = conflict.weights or [nan] * len(conflict.tasks)
        columns = (conflict.norms, weights, conflict.decrease, *conflict.cosines)
        values = np.array([*(getattr(conflict, name) for name in IN_TABLE), *chain(*columns)])
        finite = np.isfinite(values)
        self.sums = self.sums + np.where(finite, values, 0.0)
        self.finite = self.finite + finite

    def table(self, aggregator: str, group: str, tasks: Sequence[str]) -> str:
        with np.errstate(invalid="ignore"):
            means = self.sums / self.finite
        of_group, of_tasks = means[: len(IN_TABLE)], means[len(IN_TABLE) :].reshape(-1, len(tasks))
        labels = {number.name: number.label for number in CONFLICT_NUMBERS}
        summary = ", ".join(
            f"{labels[name]} {mean:.3g}" for name, mean in zip(IN_TABLE, of_group, strict=True)
        )
        cells = [["task", "norm", "weight", "decrease", *(f"cos {task}" for task in tasks)]]
        for task, values in zip(tasks, of_tasks.T, strict=True):
            cells.append([task, *(f"{value:.3g}" for value in values)])
        if not self.has_weights:
            cells = [[*row[:2], *row[3:]] for row in cells]
        steps = "1 measured step" if self.count == 1 else f"{self.count} measured steps"
        if self.nonfinite:
            steps += f", {self.nonfinite} of them with a gradient that is not finite"
        return f"{aggregator} at {group}, {steps}: {summary}\n{aligned(cells)}"


def alternatives(measurements: Iterable[Measurement]) -> list[dict[str, Alternative]]:
    """Return, for each measurement, the updates of all other aggregators at their first step.

    Evaluates one aggregator on all measurements, then the next, which takes two thirds of the time
    of the other order.
    """
    comparisons = [_Comparison(measurement) for measurement in measurements]
    for count in {len(comparison.gramian) for comparison in comparisons}:
        of_count = [comparison for comparison in comparisons if len(comparison.gramian) == count]
        for name, aggregator, state in _comparable(count):
            for comparison in of_count:
                comparison.evaluate(name, aggregator, state)
    return [comparison.alternatives() for comparison in comparisons]


@cache
def _comparable(count: int) -> tuple[tuple[str, WeightAggregator, AggregatorState], ...]:
    """Return the aggregators with weights and defaults that take `count` tasks, with first states.

    Those in `EQUIVALENTS` come last.
    """
    comparable = []
    for stem in names("aggregators"):
        kind = find("aggregators", stem)
        if issubclass(kind, WeightAggregator):
            try:
                aggregator = kind()
            except ValueError:  # it has a field without a default
                continue
            state = aggregator.init(count)
            fits = aggregator.num_tasks in (None, count) and aggregator.least_tasks <= count
            if fits and MEANS not in state:  # means over the gradients of earlier steps
                comparable.append((stem, aggregator, state))
    return tuple(sorted(comparable, key=lambda item: item[0] in EQUIVALENTS))


class _Comparison:
    """The weights of other aggregators on one measurement."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self.gramian = measurement.gramian.numpy()
        self.is_finite = bool(np.isfinite(self.gramian).all())
        self.weights: dict[str, np.ndarray] = {}
        self.equivalents: dict[str, str] = {}

    def evaluate(self, name: str, aggregator: WeightAggregator, state: AggregatorState) -> None:
        if name == self.measurement.aggregator or not self.is_finite:
            return
        equivalent = self.weights.get(EQUIVALENTS.get(name, ""))
        if equivalent is not None and self._is_equal(name, equivalent):
            self.equivalents[name] = EQUIVALENTS[name]
            return
        # It may have no solution here or refuse such losses: then it is left out.
        with suppress(ArithmeticError, ValueError):
            weights = compute_weights(
                aggregator, state, self.measurement.gramian, self.measurement.context
            )
            self.weights[name] = weights.numpy()

    def _is_equal(self, name: str, weights: np.ndarray) -> bool:
        """Whether `name`, with these weights, has the same update as its entry in `EQUIVALENTS`."""
        match name:
            case "fair_grad":  # equal if NashMTL's update has norm `max_norm`, up to rounding
                return not 0 < weights @ self.gramian @ weights < 1 - 2e-12
            case "dwa" | "grad_norm":  # refuses losses below zero
                losses = self.measurement.context.losses
                return losses is not None and min(losses.tolist()) >= 0
            case _:
                return True

    def alternatives(self) -> dict[str, Alternative]:
        if not self.is_finite:
            return {}
        weights = np.array([*self.weights.values()])  # takes a third of the time of `np.stack`
        with np.errstate(all="ignore"):
            norms = np.sqrt((weights @ self.gramian * weights).sum(1))
            divisors = (self.measurement.norm * norms).tolist()
            products = (weights @ self.measurement.products.numpy()).tolist()
        cosines = map(_ratio, products, divisors)
        pairs = zip(self.weights, map(Alternative, weights.tolist(), cosines), strict=True)
        others = dict(pairs)
        return others | {name: others[same] for name, same in self.equivalents.items()}


def compute_weights(
    aggregator: WeightAggregator,
    state: AggregatorState,
    gramian: Tensor,
    context: AggregatorContext,
) -> Tensor:
    """Return the weights of an aggregator in a given state."""
    match aggregator:
        case GramianAggregator():
            return aggregator.update(gramian, state, context)[0]
        case LossWeighting():
            return aggregator.weigh(len(gramian), state, context)[0]
