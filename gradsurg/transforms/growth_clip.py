"""GrowthClip: bound the growth of the norm from one gradient to the next."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, norm, widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class GrowthClip(Transform):
    """Bound the growth of the norm: g * min(1, factor * |r| / |g|), r the last result.

    The 2-norms are of the group selected by `per`, which is `tensor`, `unit` (an index of axis 0),
    `entry` or an einops pattern such as `o i kh kw -> o i`. The limiter of norm growth of Fira
    (Chen et al. 2024, arXiv 2410.01623, equation 8), with factor as gamma.

    The first gradient is not clipped, nor is a gradient after a result of zero; NaN and infinities
    in them stay. In other gradients a NaN makes its group NaN; an infinity becomes NaN and the rest
    of its group zero. Both keep |r|, the state of a site, in float32 or wider. Any shape; zero
    stays zero, an empty tensor empty.
    """

    factor: Annotated[float, Field(ge=1)] = 1.01
    _: KW_ONLY
    per: Per = "tensor"

    tags = frozenset(
        {"odd", "sign_preserving", "norm_non_increasing", "deterministic", "differentiable"}
    )

    def init(self, grad: Tensor) -> TransformState:
        return {"norm": torch.zeros_like(norm(grad, self.per))}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        size, before = norm(grad, self.per), state["norm"]
        divisor = torch.where((before > 0) & (size != 0), size, 1.0)
        bound = torch.where(before > 0, self.factor * before, 1.0)
        result = widened(grad) * (bound / divisor).clamp(max=1.0)
        smaller = torch.where(before > 0, torch.minimum(size, bound), size)
        return result.to(grad.dtype), {"norm": torch.where(size.isfinite(), smaller, before)}
