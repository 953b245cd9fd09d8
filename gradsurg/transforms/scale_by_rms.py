"""ScaleByRMS: divide the gradient by the running root mean square of each entry."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class ScaleByRMS(Transform):
    """Divide the gradient by the running root mean square of each entry: g / (sqrt(v) + eps).

    Here v is the running mean of the squares: v <- decay * v + (1 - decay) * g^2. `debias` divides
    v by 1 - decay^n at the n-th gradient. RMSprop has this second moment (Tieleman and Hinton
    2012), and Adam has it with `debias` (Kingma and Ba, ICLR 2015, arXiv 1412.6980). Here any
    optimizer may follow. optax has it as `scale_by_rms`.

    v is the state of a site, initially zero, in float32 or wider. Any shape; zero stays zero, an
    empty tensor empty. A NaN or an infinity becomes NaN and stays in v: later results of the entry
    are NaN after a NaN, and zero after an infinity. Put `Sanitize` before it.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    _: KW_ONLY
    eps: Annotated[float, Field(gt=0)] = 1e-8
    debias: bool = False

    tags = frozenset({"elementwise", "odd", "sign_preserving", "deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        left = torch.ones((), dtype=torch.float64, device=grad.device)
        return {"square": torch.zeros_like(widened(grad)), "left": left}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide, left = widened(grad), state["left"] * self.decay
        square = self.decay * state["square"] + (1 - self.decay) * wide.square()
        seen = 1 - left if self.debias else torch.ones_like(left)
        result = wide / ((square / seen.to(wide.dtype)).sqrt() + self.eps)
        return result.to(grad.dtype), {"square": square, "left": left}
