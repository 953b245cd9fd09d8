"""Perpendicular: remove the component of the gradient along the weights."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, direction, norm, sums, widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty, value_of


@validated
class Perpendicular(Stateless):
    """Remove the component along the value w: g - (w.g / w.w) w.

    Args:

    - `rescale`: give the result the norm of g.
    - `below`: change a tensor only if all its cosines are small, max abs(w.g) / (|w| |g|) < below /
      sqrt(d) with d the number of entries of a group.

    w.g is over the group selected by `per`, which is `tensor`, `unit` (an index of axis 0), `entry`
    or an einops pattern such as `o i kh kw -> o i`. The value w is the tensor whose gradient is g;
    sites without one, such as autograd nodes, are refused.

    perpGrad of Prieto et al. 2025 (arXiv 2501.04697); its code rescales. AdamP (Heo et al., ICLR
    2021, arXiv 2006.08217) takes units and then the whole tensor, with `below` 0.1 and Adam's
    update for g.

    Any shape; zero stays zero, an empty tensor empty; a tensor of one entry becomes about zero.
    Where w is zero g is not changed. A NaN or an infinity in g or w makes its group NaN.
    """

    rescale: bool = False
    _: KW_ONLY
    below: Annotated[float, Field(gt=0)] | None = None
    per: Per = "tensor"

    needed = frozenset({"value"})

    tags = frozenset({"homogeneous", "odd", "norm_non_increasing", "deterministic"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        is_projection = not self.rescale and self.below is None
        return {"linear": is_projection, "idempotent": is_projection}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        wide = widened(grad)
        along = direction(value_of(self, context), self.per).to(wide.dtype)
        size = norm(wide, self.per)
        unit = wide / torch.where(size == 0, 1.0, size)
        cosine = sums(along * unit, self.per)
        # Twice: the rounding error of the first difference lies along w too.
        rest = unit - cosine * along
        rest = rest - sums(along * rest, self.per) * along
        if self.rescale:
            # A gradient along w has no direction left but rounding errors.
            left = norm(rest, self.per)
            parallel = left <= 16 * torch.finfo(wide.dtype).eps
            rest = torch.where(parallel, torch.zeros_like(rest), rest / left)
        result = size * rest
        if self.below is not None:
            entries = max(1, grad.numel() // max(1, cosine.numel()))
            most = cosine.abs().amax() if cosine.numel() else cosine.sum()
            result = torch.where(most >= self.below / entries**0.5, wide, result)
        return result.to(grad.dtype)
