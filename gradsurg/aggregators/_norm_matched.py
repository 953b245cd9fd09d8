"""NormMatchedSum: the sum of the gradients, as long as what an aggregator makes of them."""

from collections.abc import Sequence
from math import hypot

import torch
from torch import Tensor

from gradsurg.aggregators._rows import combined, wide
from gradsurg.aggregators.base import Aggregator, Context, Property, State
from gradsurg.plugins.fields import validated


@validated
class NormMatchedSum(Aggregator):
    """The direction of the sum with the norm of A(J): the control that tells direction from length.

    Where the sum is zero it stays zero. Not for what weighs the losses: that changes the gradients
    of the tasks' own parameters too, and this does not.
    """

    of: Aggregator

    @property
    def properties(self) -> frozenset[Property]:
        kept: frozenset[Property] = frozenset(
            {"permutation_invariant", "homogeneous", "deterministic"}
        )
        return self.of.properties & kept

    @property
    def num_tasks(self) -> int | None:
        return self.of.num_tasks

    @property
    def least_tasks(self) -> int:
        return self.of.least_tasks

    def init(self, num_tasks: int) -> State:
        return self.of.init(num_tasks)

    def merge(self, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        merged, state = self.of.merge(rows, state, context)
        return sums_as_long([rows], [merged])[0], state


def sums_as_long(blocks: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the rows of each block, which together are as long as the gradients together."""
    ones = torch.ones(len(blocks[0]), dtype=torch.float64)
    sums = [combined(wide(rows), ones).double() for rows in blocks]
    norm = _norm(sums)
    ratio = _norm(grads) / (norm if norm > 0 else 1.0)
    return [(total * ratio).to(rows.dtype) for total, rows in zip(sums, blocks, strict=True)]


def _norm(grads: Sequence[Tensor]) -> float:
    return hypot(*[float(grad.double().norm()) for grad in grads])
