"""AndMask: the mean of the gradients where their signs agree, zero elsewhere."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext, Entrywise
from gradsurg.plugins.fields import validated


@validated
class AndMask(Entrywise):
    """Return the mean of each entry where the signs of the T gradients agree, zero elsewhere.

    Entries with abs(mean of their signs) >= `threshold` agree.

    AND-mask of Parascandolo et al., ICLR 2021 (arXiv 2009.00329), with tasks, or the examples of a
    batch in `PerSample`, as environments.

    A zero has the sign 0, which agrees with none. Identical gradients and one task are unchanged,
    opposite ones give zero. A NaN or an infinity makes its entry NaN or infinite.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] = 1.0

    tags = frozenset({"permutation_invariant", "homogeneous", "deterministic"})

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        mean, signs = wide.mean(0), wide.sign().mean(0).abs()
        # The mean of T equal signs can be below one by a rounding error.
        kept = (signs >= self.threshold * (1 - 1e-6)) | ~mean.isfinite()
        return torch.where(kept, mean, 0.0).to(rows.dtype)
