"""GrokfastEMA: amplify the slow component of the gradient."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class GrokfastEMA(Transform):
    """Add an exponential moving average: g + strength * m, m <- decay * m + (1 - decay) * g.

    Grokfast-EMA of Lee et al. 2024 (arXiv 2405.20233), with decay as alpha and strength as lambda.

    m is the state of a site, initialized by its first gradient, in float32 or wider. Any shape; an
    empty tensor stays empty. The result of a zero gradient is strength * m. A NaN or an infinity
    stays in m: put `Sanitize` before it.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.GrokfastEMA(strength=2.0))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # the first mean is the gradient itself
    tensor([[  9., -12.]])
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    strength: float = 2.0

    tags = frozenset({"elementwise", "deterministic", "differentiable"})

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
