"""GEM: project the current gradient to remove its conflicts with the gradients of memories."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._memory import Order, memories, order_note, places, shown
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
)
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import (
    Array,
    nonnegative_least_squares,
    nonnegative_qp,
    solve_weights,
    solve_weights_of_rows,
)
from gradsurg.plugins.fields import validated

Name = Annotated[str, Field(min_length=1)]


@validated
class GEM(GramianAggregator, SolvedOnRows):
    """Find the point nearest to g among the d with g_k · d >= 0 for all memories k.

    g is the gradient of the current data. The g_k are the gradients of memories of earlier data,
    which only constrain g. `memory` has the names of all losses except the current data's; a memory
    that is not among the losses of a call imposes no constraint. Without names the first loss is
    the current data, and a warning says so once, unless the names of the others begin with
    `memory`. With a `margin`, margin g_k of each memory is added to g before the projection.

    d = g + Σ v_k g_k with v >= 0 the minimizer of |d|, solved by an active set on the cosines. With
    one memory and no margin it is `AGEM`.

    Equations 8 to 12 of Lopez-Paz and Ranzato, NeurIPS 2017 (arXiv 1706.08840). The authors' code
    asks for v_k >= `margin` in place of v >= 0 (0.5 in their experiments, "memory strength"), which
    has the effect above. It also adds 1e-3 to the diagonal of the problem, which is left out here.

    Without memories g is unchanged, a zero memory imposes no constraint, opposite gradients give
    zero. With a margin the result may conflict with g. For dependent gradients the weights are not
    unique, but the result is. A NaN or infinity makes every weight NaN. Three or more nearly
    dependent gradients are solved on a triangular factor of them, see `DualProj`.
    """

    margin: Annotated[float, Field(ge=0)] = 0.0
    memory: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None

    def __repr__(self) -> str:
        return shown(self)

    tags = frozenset({"homogeneous", "deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        names: tuple[AggregatorProperty, ...] = (
            "non_conflicting",
            "linear_under_scaling",
            "scale_invariant",
        )
        return dict.fromkeys(names, self.margin == 0)

    def memories(self, tasks: Sequence[str]) -> Sequence[int]:
        return memories(self, self._memories, tasks)

    def order_note(self, tasks: Sequence[str]) -> str:
        return order_note(self._memories, tasks)

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.weights(gramian, self.places(context.tasks, len(gramian))), state

    def places(self, tasks: Sequence[str], count: int) -> Order:
        return places(self, self._memories, tasks, count)

    @property
    def _memories(self) -> Sequence[str]:
        return (self.memory,) if isinstance(self.memory, str) else self.memory or ()

    def weights(self, gramian: Tensor, places: Order | None = None) -> Tensor:
        """Return the weights (T,) of the rows; without `places` the first is the current data."""
        places = np.arange(len(gramian)) if places is None else places
        current = _is_first(places, gramian.diagonal().numpy() > 0)

        def general(cosines: Array, norms: Array) -> Array:
            v = self._target(current, norms)
            linear, scale = -(v @ cosines)[None, ~current], np.abs(v).max()
            if len(linear[0]):
                memories = cosines[~current][:, ~current]
                v[~current] += nonnegative_qp(memories, linear, np.full((1, 1), scale))[0]
            return v

        on_rows = partial(self._projected_rows, current=current)
        return solve_weights(gramian, general, on_rows=on_rows)

    def weights_of_rows(self, rows: Tensor, order: Tensor, ridge: float, least: float) -> Tensor:
        nonzero = np.linalg.norm(rows.numpy(), axis=1) > 0
        on_rows = partial(self._projected_rows, current=_is_first(order.numpy(), nonzero))
        return solve_weights_of_rows(rows, on_rows, ridge, least)

    def largest_norm(self, rows: Tensor, order: Tensor) -> float:
        target = self._target(order.numpy() == 0, np.ones(len(rows)))
        return float(np.linalg.norm(target @ rows.numpy()))

    def _projected_rows(
        self, unit: Array, norms: Array, ridge: float, _: float, current: NDArray[np.bool_]
    ) -> Array:
        v = self._target(current, norms)
        memories = unit[~current]
        v[~current] += nonnegative_least_squares(memories, -(v @ unit), ridge)
        return v

    def _target(self, current: NDArray[np.bool_], norms: Array) -> Array:
        return np.where(current, norms, self.margin * norms)


def _is_first(order: NDArray[np.int64], nonzero: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each nonzero row belongs to the first task."""
    return (order == 0)[nonzero]
