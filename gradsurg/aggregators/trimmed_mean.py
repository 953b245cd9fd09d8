"""TrimmedMean: the mean of each entry without its largest and smallest values."""

from math import ceil
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext, Entrywise
from gradsurg.aggregators.rows import COLUMNS
from gradsurg.plugins.fields import validated

MAX_PASSES = 8
"""Passes of a bubble sort of whole rows, above which each column is sorted."""


@validated
class TrimmedMean(Entrywise):
    """Average each entry over the tasks, without the beta T largest and the beta T smallest values.

    The number of values left out on each side, `beta` T, is rounded up, but one value (T odd) or
    two (T even) always remain. So one or two tasks give their mean, and beta 0.5 the median.

    Yin et al., ICML 2018 (arXiv 1803.01498), definition 2; their beta is the share of workers that
    may be faulty, 0.05 and 0.1 in their experiments.

    Extreme values are left out by sorting, not subtracted from a sum, so a huge one leaves no
    rounding error. A NaN makes its column NaN.
    """

    beta: Annotated[float, Field(ge=0, le=0.5)] = 0.1

    tags = frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        count = len(rows)
        # 1e-9 corrects rounding: 0.28 * 25 is slightly above 7.
        trimmed = min(ceil(self.beta * count - 1e-9), (count - 1) // 2)
        result = torch.empty_like(rows[0])
        # Few enough columns at a time to sort them in the cache.
        for start in range(0, rows.shape[1], COLUMNS // 4):
            part = slice(start, start + COLUMNS // 4)
            result[part] = _mean_of_the_middle(rows[:, part], trimmed)
        return result


def _mean_of_the_middle(rows: Tensor, trimmed: int) -> Tensor:
    """Average the columns after `trimmed` passes of a bubble sort from both ends."""
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    if trimmed > MAX_PASSES:
        middle = wide.T.sort(dim=1).values[:, trimmed : len(rows) - trimmed].mean(1)
        return torch.where(wide.isnan().any(0), torch.nan, middle).to(rows.dtype)
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
