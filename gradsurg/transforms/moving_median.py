"""MovingMedian: replace each entry by its median over the last gradients."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class MovingMedian(Transform):
    """Replace each entry by its median over the last `window` gradients, this one included.

    It ignores spikes in fewer than half of them, which would move a mean. The median of an even
    number of entries is the mean of the middle two.

    A NaN is left out; the median of none is NaN. An infinity counts as the largest or smallest
    number. The state of a site is `window` gradients, in float32 or wider. Any shape; an empty
    tensor stays empty.
    """

    window: Annotated[int, Field(ge=1)] = 5

    tags = frozenset({"elementwise", "deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        return {
            "past": widened(grad).new_zeros((self.window, *grad.shape)),
            "count": torch.zeros((), dtype=torch.int64, device=grad.device),
        }

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide, count = widened(grad), state["count"] + 1
        past = torch.cat([state["past"][1:], wide[None]])
        places = torch.arange(self.window, 0, -1, device=grad.device)
        is_empty = (places > count).view(-1, *[1] * grad.ndim)
        seen = past.masked_fill(is_empty, torch.nan)
        known = (~seen.isnan()).sum(0)
        middle = torch.stack([(known - 1).clamp(min=0) // 2, known // 2])
        # NaNs are the last; where nothing is known both middles are the first, a NaN.
        result = seen.sort(dim=0).values.gather(0, middle).mean(0)
        return result.to(grad.dtype), {"past": past, "count": count}
