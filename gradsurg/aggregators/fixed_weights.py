"""FixedWeights: a constant weight for each task."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs
from torch import Tensor

from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    LossWeighting,
)
from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.messages import unknown

Weights = Annotated[tuple[float, ...], Field(min_length=1)]


@validated
class FixedWeights(LossWeighting):
    """Sum the gradients with one constant weight for each task, given in order or by name.

    `FixedWeights({"first": 1.0, "second": 0.5})` is the same as `FixedWeights((1.0, 0.5),
    tasks=("first", "second"))`, and must name every task. None means a weight of one for each task.
    Weights may have any sign and any sum.

    A wrong number of tasks is an error. A NaN stays in its columns, also under a weight of 0.
    """

    weights: Weights | None
    tasks: tuple[str, ...] = ()

    if TYPE_CHECKING:  # the accepted arguments, which `_by_name` converts to the fields

        def __init__(
            self, weights: Sequence[float] | Mapping[str, float] | None, tasks: Sequence[str] = ()
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: ArgsKwargs) -> ArgsKwargs:
        """Split a mapping into names and weights."""
        fields = dict(zip(("weights", "tasks"), given.args, strict=False)) | (given.kwargs or {})
        weights = fields.get("weights")
        if isinstance(weights, str | int | float):
            text = "must be a list, or a mapping with a number for each task"
            raise Contradiction("weights", f"{text}, found {weights!r}")
        if not isinstance(weights, Mapping) or len(given.args) > 2:
            return given
        if fields.get("tasks"):
            raise Contradiction("tasks", "must be empty if weights are given by name")
        for task, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise Contradiction(f"weights.{task}", f"must be a number, found {weight!r}")
            if not isfinite(weight):
                raise Contradiction(f"weights.{task}", f"must be finite, found {weight!r}")
        named = {"weights": tuple(weights.values()), "tasks": tuple(map(str, weights))}
        return ArgsKwargs((), {**fields, **named})

    def __post_init__(self) -> None:
        if not self.tasks:
            return
        names, count = ", ".join(self.tasks), len(self.weights or ())
        if len(set(self.tasks)) != len(self.tasks):
            raise Contradiction("tasks", f"must name each task once, found {names}")
        if len(self.tasks) != count:
            text = f"must be one name for each weight, found {names} for {count} weights"
            raise Contradiction("tasks", text)

    @property
    def num_tasks(self) -> int | None:
        return None if self.weights is None else len(self.weights)

    tags = frozenset({"linear_under_scaling", "homogeneous", "deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        weights = self.weights or (1.0,)
        alone, zero = self.weights is not None and len(weights) == 1, not any(weights)
        return {
            "permutation_invariant": len(set(weights)) == 1,
            "strongly_stationary": min(weights) > 0,
            "non_conflicting": zero or (alone and weights[0] >= 0),
            "scale_invariant": zero or alone,
        }

    def init(self, num_tasks: int) -> AggregatorState:
        if not self.tasks:
            self._check(num_tasks)  # by name, `_in_order` reports the missing ones
        return {}

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        if self.weights is None:
            return torch.ones(num_tasks, dtype=torch.float64), state
        weights = self.weights
        if self.tasks:
            weights = self._in_order(dict(zip(self.tasks, weights, strict=True)), context.tasks)
        self._check(num_tasks)
        return torch.tensor(weights, dtype=torch.float64), state

    def _in_order(self, named: Mapping[str, float], tasks: tuple[str, ...]) -> tuple[float, ...]:
        if not tasks:
            text = (
                "are by task name, and the call has no task names: use live.backward(losses), "
                "or pass AggregatorContext(tasks=...)"
            )
            raise FieldError(self, [("weights", text)])
        for name in named:
            if name not in tasks:
                text = unknown(f"there is no task '{name}'", name, tasks)
                raise FieldError(self, [("weights", text)])
        for task in tasks:
            if task not in named:
                given = ", ".join(named)
                raise FieldError(self, [("weights", f"task '{task}' has none, found {given}")])
        return tuple(named[task] for task in tasks)

    def _check(self, num_tasks: int) -> None:
        if self.num_tasks not in (None, num_tasks):
            text = (
                f"must be one for each task, found {self.num_tasks} weights for {num_tasks} tasks"
            )
            raise FieldError(self, [("weights", text)])
