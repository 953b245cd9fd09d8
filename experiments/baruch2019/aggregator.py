"""LittleIsEnough: corrupt gradients close to the honest ones, in front of any aggregator."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import Aggregator, AggregatorContext, AggregatorState
from gradsurg.plugins.fields import validated


@validated
class LittleIsEnough(Aggregator):
    """Replace the first `num_corrupt` rows by mean - z std of the others, then aggregate by `of`.

    Mean and standard deviation are taken per entry over the honest rows. This is the attack of
    Baruch, Baruch and Goldberg, NeurIPS 2019 (arXiv 1902.06156), whose attacker knows the honest
    gradients. With `num_corrupt` 0 only `of` acts. A NaN or infinity in an honest row makes its
    entry NaN in the corrupt rows. Raises ValueError for fewer than two honest rows.
    """

    of: Aggregator
    _: KW_ONLY
    num_corrupt: Annotated[int, Field(ge=0)] = 4
    z: float = 1.0

    @property
    def num_tasks(self) -> int | None:
        return self.of.num_tasks

    @property
    def least_tasks(self) -> int:
        return max(self.of.least_tasks, self.num_corrupt + 2)

    def init(self, num_tasks: int) -> AggregatorState:
        return self.of.init(num_tasks)

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        if len(rows) < self.least_tasks:
            text = f"needs {self.least_tasks} tasks or more, found {len(rows)}"
            raise ValueError(f"{type(self).__name__} {text}")
        if self.num_corrupt:
            honest = rows[self.num_corrupt :]
            sent = honest.mean(dim=0) - self.z * honest.std(dim=0, correction=0)
            rows = torch.cat([sent.expand(self.num_corrupt, -1), honest])
        return self.of.merge(rows, state, context)
