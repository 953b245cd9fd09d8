"""GEM: project the current gradient to remove its conflicts with the gradients of memories."""

from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import (
    Array,
    nonnegative_least_squares,
    nonnegative_qp,
    solve_weights,
    solve_weights_of_rows,
)
from gradsurg.plugins.fields import validated


@validated
class GEM(Weighting, SolvedOnRows):
    """The point nearest to g among the d with g_k · d >= 0 for all memories k.

    The first task is g, the current data; the others are memories of earlier data, which only
    constrain g. d = g + Σ v_k g_k with v >= 0 the minimizer of |d|. Equations 8 to 12 of Lopez-Paz
    and Ranzato, NeurIPS 2017 (arXiv 1706.08840), solved by an active set on the cosines. Their code
    asks for v_k >= `margin` instead (0.5 in their experiments, "memory strength"), which adds
    margin g_k of each memory to g before the projection, and 1e-3 to the diagonal of the problem,
    which is left out here. With one memory and no margin it is `AGEM`.

    Without memories g is unchanged, a zero memory imposes no constraint, opposite gradients give
    zero. With a margin the result may conflict with g. For dependent gradients the weights are not
    unique, but the result is. A NaN or infinity makes every weight NaN. Three or more nearly
    dependent gradients are solved on a triangular factor of them, as in `DualProj`.
    """

    margin: Annotated[float, Field(ge=0)] = 0.0

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        properties: set[AggregatorProperty] = {"homogeneous", "deterministic"}
        if self.margin == 0:
            properties |= {"non_conflicting", "linear_under_scaling", "scale_invariant"}
        return frozenset(properties)

    def weights(self, gramian: Tensor) -> Tensor:
        current = _is_first(np.arange(len(gramian)), gramian.diagonal().numpy() > 0)

        def general(cosines: Array, norms: Array) -> Array:
            v = self._target(current, norms)
            linear, scale = -(v @ cosines)[None, ~current], np.abs(v).max()
            if len(linear[0]):
                memories = cosines[~current][:, ~current]
                v[~current] += nonnegative_qp(memories, linear, np.full((1, 1), scale))[0]
            return v

        def pair(cosine: float, norm: float, other: float) -> tuple[float, float]:
            return norm, max(self.margin * other, -cosine * norm)

        on_rows = partial(self._projected_rows, current=current)
        return solve_weights(gramian, general, pair, on_rows=on_rows)

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
    """Whether each nonzero row is that of the first task."""
    return (order == 0)[nonzero]
