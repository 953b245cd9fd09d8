"""What every other aggregator would have done with the same gradients."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import inf, nan

import numpy as np
from torch import Tensor

from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    LossWeighting,
)
from gradsurg.aggregators.solvers import CACHED_GRAMIANS
from gradsurg.plugins.registry import find, names

Weigher = GramianAggregator | LossWeighting

TWINS = {"fair_grad": "nash_mtl", "grad_norm": "sum", "grad_vac": "pcgrad"}
"""With their defaults, and at a first step, they do what others do: which is not solved twice."""


@dataclass(frozen=True)
class Other:
    """What another aggregator would have done, from the same gradients, at its first step."""

    weights: list[float]
    cosine: float  # of its update to the one that was used


@cache
def _comparable(count: int) -> tuple[tuple[str, Weigher, AggregatorState], ...]:
    """Every aggregator that has weights, needs no field and takes so many tasks, with its defaults
    and its first state.
    """
    made = []
    for stem in names("aggregators"):
        kind = find("aggregators", stem)
        if issubclass(kind, Weigher):
            try:
                own = kind()
            except ValueError:  # it has a field without a default
                continue
            if own.num_tasks in (None, count) and own.least_tasks <= count:
                made.append((stem, own, own.init(count)))
    return tuple(sorted(made, key=lambda own: own[0] in TWINS))


@dataclass(frozen=True)
class Made:
    """What an aggregator made of the gradients g_i of a group: an update d.

    `label` is the name of its intervention, `aggregator` its own. `weights` are the w of
    d = sum w_i g_i, where there is one; `products` are g_i . d and `norm` is |d|.
    """

    label: str
    aggregator: str
    context: AggregatorContext
    gramian: Tensor
    weights: Tensor | None
    products: Tensor
    norm: float


def others_of(made: Sequence[Made]) -> list[dict[str, Other]]:
    """What every other aggregator would have done with each: one after the other is asked about
    all, which takes two thirds of the time that it takes to ask all about one after the other.
    """
    answers = [_Answers(one) for one in made]
    for start in range(0, len(answers), CACHED_GRAMIANS):  # or what solvers share would be lost
        block = answers[start : start + CACHED_GRAMIANS]
        for count in {len(one.gramian) for one in block}:
            asked = [one for one in block if len(one.gramian) == count]
            for name, aggregator, state in _comparable(count):
                for one in asked:
                    one.ask(name, aggregator, state)
    return [one.others() for one in answers]


class _Answers:
    """What others would have done with the same gradients."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.gramian = made.gramian.numpy()
        self.finite = bool(np.isfinite(self.gramian).all())
        self.weights: dict[str, np.ndarray] = {}
        self.twins: dict[str, str] = {}

    def ask(self, name: str, aggregator: Weigher, state: AggregatorState) -> None:
        if name == self.made.aggregator or not self.finite:
            return
        twin = self.weights.get(TWINS.get(name, ""))
        if twin is not None and self._agree(name, twin):
            self.twins[name] = TWINS[name]
            return
        # Else it has no answer, or takes no such losses, and was not asked to act.
        with suppress(ArithmeticError, ValueError):
            found = weights_of(aggregator, state, self.made.gramian, self.made.context)
            self.weights[name] = found.numpy()

    def _agree(self, name: str, twin: np.ndarray) -> bool:
        """Whether it does here what its twin does, of these weights."""
        match name:
            case "fair_grad":  # NashMTL's update may not be as long as `max_norm`, but for rounding
                return not 0 < twin @ self.gramian @ twin < 1 - 2e-12
            case "grad_norm":  # it takes no losses below zero
                losses = self.made.context.losses
                return losses is not None and min(losses.tolist()) >= 0
            case _:
                return True

    def others(self) -> dict[str, Other]:
        if not self.finite:
            return {}
        weights = np.array([*self.weights.values()])  # a third of what `np.stack` takes
        with np.errstate(all="ignore"):
            lengths = np.sqrt((weights @ self.gramian * weights).sum(1))
            sizes = (self.made.norm * lengths).tolist()
            along = (weights @ self.made.products.numpy()).tolist()
        cosines = map(ratio, along, sizes)
        others = dict(zip(self.weights, map(Other, weights.tolist(), cosines), strict=True))
        return others | {name: others[twin] for name, twin in self.twins.items()}


def weights_of(
    aggregator: Weigher, state: AggregatorState, gramian: Tensor, context: AggregatorContext
) -> Tensor:
    """The weights that it gives in this state."""
    match aggregator:
        case GramianAggregator():
            return aggregator.update(gramian, state, context)[0]
        case LossWeighting():
            return aggregator.weigh(len(gramian), state, context)[0]


def ratio(number: float, by: float) -> float:
    """NaN where there is none: over zero, infinity or NaN."""
    return number / by if 0 < by < inf else nan
