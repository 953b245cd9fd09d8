"""AGEM: project the current gradient to remove its conflict with the gradient of a memory."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._memory import memories, order_note, places, shown
from gradsurg.aggregators.base import (
    MEANS,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
)
from gradsurg.plugins.fields import validated


@validated
class AGEM(GramianAggregator):
    """Project the current gradient to remove its conflict with the gradient of a memory.

    `memory` is the name of the memory's loss. Without it the first task is the current data and the
    second the memory, and a warning says so once, unless the name of the second begins with
    `memory`. With `decay` the memory's gradient g_ref is replaced by its running mean, so that a
    small batch of the memory stands for the earlier batches too.

    The result is g, or if g · g_ref < 0, g - (g · g_ref) / |g_ref|² g_ref. g is the gradient of the
    current data. g_ref is the gradient of a memory of earlier data, which only constrains g and is
    not followed itself. The running mean is decay * g_ref + (1 - decay) * (the gradient of the
    memory). It begins with the first gradient, and the state has the size of both rows.

    Section 4 of Chaudhry et al., ICLR 2019 (arXiv 1812.00420).

    A g_ref of zero imposes no constraint. Identical gradients and one task are unchanged, opposite
    gradients give zero. A NaN or infinity makes every weight NaN. More than two tasks are refused:
    `GEM` has one g_ref for each earlier task.
    """

    memory: Annotated[str, Field(min_length=1)] | None = None
    _: KW_ONLY
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __repr__(self) -> str:
        return shown(self)

    @property
    def num_tasks(self) -> int:
        return 2

    tags = frozenset({"deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        names: tuple[AggregatorProperty, ...] = (
            "non_conflicting",
            "linear_under_scaling",
            "scale_invariant",
            "homogeneous",
        )
        # with `decay` the mean lags behind the memory's gradient, which alone they are about
        return dict.fromkeys(names, not self.decay)

    def memories(self, tasks: Sequence[str]) -> Sequence[int]:
        return memories(self, (self.memory,) if self.memory else (), tasks)

    def order_note(self, tasks: Sequence[str]) -> str:
        return order_note((self.memory,) if self.memory else (), tasks)

    def init(self, num_tasks: int) -> AggregatorState:
        return {MEANS: torch.zeros(num_tasks, 0)} if self.decay else {}

    def mixing(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> Tensor | None:
        if not self.decay:
            return None
        places_of = places(self, (self.memory,) if self.memory else (), context.tasks, num_tasks)
        is_memory = torch.from_numpy(places_of > 0) & bool(state[MEANS].numel())
        kept = self.decay * is_memory.double()
        return torch.stack([kept, 1 - kept], dim=1)

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        if self.memory is None:
            return self.weights(gramian), state
        place = places(self, (self.memory,), context.tasks, len(gramian))
        if 0 not in place:
            return torch.zeros(len(gramian), dtype=torch.float64), state
        order = np.argsort(place)
        return self.weights(gramian[order][:, order])[np.argsort(order)], state

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)
        if count > 2:
            raise ValueError(
                f"AGEM needs two tasks, the current data and the memory, found {count}"
            )
        if not gramian.isfinite().all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        weights = torch.tensor([1.0, 0.0][:count], dtype=torch.float64)
        inner, square = gramian[[0, -1], -1].tolist()  # on the CPU, as every Gramian is
        if inner < 0 < square:
            weights[1] = -inner / square
        return weights
