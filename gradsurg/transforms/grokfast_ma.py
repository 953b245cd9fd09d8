"""GrokfastMA: amplify the mean of the last gradients."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class GrokfastMA(Transform):
    """Add a moving average: g + strength * m, m the mean of g and the `window` - 1 before.

    The first window - 1 gradients are not changed. `warmup=false` takes the mean of the gradients
    so far instead. Grokfast-MA of Lee et al. 2024 (arXiv 2405.20233), with window as w and strength
    as lambda.

    The state of a site is `window` gradients, in float32 or wider: `GrokfastEMA` needs one. Any
    shape; an empty tensor stays empty. The result of a zero gradient is strength * m. A NaN or an
    infinity stays in m for `window` gradients: put `Sanitize` before it.
    """

    window: Annotated[int, Field(ge=1)] = 100
    strength: float = 5.0
    _: KW_ONLY
    warmup: bool = True

    tags = frozenset({"elementwise", "deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        wide = widened(grad)
        return {
            "past": wide.new_zeros((self.window, *grad.shape)),
            "count": torch.zeros((), dtype=torch.int64, device=grad.device),
        }

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide = widened(grad)
        past, count = torch.cat([state["past"][1:], wide[None]]), state["count"] + 1
        amplified = wide + self.strength * (past.sum(dim=0) / count.clamp(max=self.window))
        waits = (count < self.window) & self.warmup
        result = torch.where(waits, wide, amplified).to(grad.dtype)
        return result, {"past": past, "count": count}
