"""GrokfastEMA: amplify the slow part of the gradient."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.per import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformProperty, TransformState


@validated
class GrokfastEMA(Transform):
    """Add a running mean: g + strength * m, with m = g at first, then decay * m + (1 - decay) * g.

    m is kept for each site, in float32 or wider. Any shape; an empty tensor stays empty. A zero
    gradient still gets strength * m. A NaN or an infinity stays in m for good: put
    `Sanitize` before it. Grokfast-EMA of Lee et al. 2024 (arXiv 2405.20233): decay is its alpha,
    strength its lambda.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    strength: float = 2.0

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"elementwise", "deterministic"})

    def init(self, grad: Tensor) -> TransformState:
        return {
            "mean": torch.zeros_like(widened(grad)),
            "started": torch.zeros((), dtype=torch.bool, device=grad.device),
        }

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide = widened(grad)
        moved = self.decay * state["mean"] + (1 - self.decay) * wide
        mean = torch.where(state["started"], moved, wide)
        result = (wide + self.strength * mean).to(grad.dtype)
        return result, {"mean": mean, "started": torch.ones_like(state["started"])}
