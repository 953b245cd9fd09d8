"""TrimmedMean: the mean of each entry without its largest and smallest values."""

from math import ceil
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext, AggregatorProperty, Entrywise
from gradsurg.aggregators.rows import COLUMNS
from gradsurg.plugins.fields import validated


@validated
class TrimmedMean(Entrywise):
    """The mean of each entry over the tasks, without the beta T largest and smallest of them.

    beta T is rounded up, and one or two values always stay: with one or two tasks it is their
    mean, with beta 0.5 the median. Yin et al., ICML 2018 (arXiv 1803.01498), definition 2; they
    take for beta the share of workers that may lie, 0.05 and 0.1 in their experiments. Values are
    sorted, none is subtracted again, so a huge one leaves no trace. A NaN makes its column NaN.
    """

    beta: Annotated[float, Field(ge=0, le=0.5)] = 0.1

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        count = len(rows)
        # Less a little: 0.28 * 25 is a little more than 7.
        trimmed = min(ceil(self.beta * count - 1e-9), (count - 1) // 2)
        result = torch.empty_like(rows[0])
        # So few columns at once that they stay in the cache while they are sorted.
        for start in range(0, rows.shape[1], COLUMNS // 4):
            part = slice(start, start + COLUMNS // 4)
            result[part] = _mean_of_the_middle(rows[:, part], trimmed)
        return result


def _mean_of_the_middle(rows: Tensor, trimmed: int) -> Tensor:
    """A bubble sort of every column at once, no further than it is needed."""
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    values = list(wide)
    for _ in range(trimmed):
        for index in range(len(values) - 1):
            low, high = values[index], values[index + 1]
            values[index], values[index + 1] = torch.minimum(low, high), torch.maximum(low, high)
        del values[-1]
        for index in range(len(values) - 1, 0, -1):
            low, high = values[index - 1], values[index]
            values[index - 1], values[index] = torch.minimum(low, high), torch.maximum(low, high)
        del values[0]
    return torch.stack(values).mean(0).to(rows.dtype)
