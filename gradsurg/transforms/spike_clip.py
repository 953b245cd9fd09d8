"""SpikeClip: bound every entry by a multiple of its usual size."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class SpikeClip(Transform):
    """Replace entries with g^2 > threshold * v by sign(g) sqrt(threshold * v), v their mean square.

    v <- decay v + (1 - decay) g^2 starts at zero, is not corrected for that, and uses g after
    clipping. It is not the second moment that Adam keeps. The first `warmup` gradients are not
    clipped. SPAM of Huang et al., ICLR 2025 (arXiv 2501.06842), without its resets of Adam's
    moments.

    v is the state of a site, in float32 or wider. Any shape. Zero stays zero, NaN stays NaN, an
    empty tensor stays empty. In the warm-up an infinity stays; later it becomes the bound, also in
    v. A NaN, and an infinity in the warm-up, do not change v.
    """

    threshold: Annotated[float, Field(gt=0)] = 5000.0
    _: KW_ONLY
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    warmup: Annotated[int, Field(ge=1)] = 20

    tags = frozenset(
        {
            "elementwise",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def init(self, grad: Tensor) -> TransformState:
        return {
            "square": torch.zeros_like(widened(grad)),
            "count": torch.zeros((), dtype=torch.int64, device=grad.device),
        }

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide, square = widened(grad), state["square"]
        bound = self.threshold * square
        clips = (wide.square() > bound) & (state["count"] >= self.warmup)
        result = torch.where(clips, wide.sign() * bound.sqrt(), wide)
        moved = self.decay * square + (1 - self.decay) * result.square()
        after = {
            "square": torch.where(moved.isfinite(), moved, square),
            "count": state["count"] + 1,
        }
        return result.to(grad.dtype), after
