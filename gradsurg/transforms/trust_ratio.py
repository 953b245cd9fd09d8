"""TrustRatio: scale the gradient to a fraction of the norm of the weights."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, direction, norm, widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty, value_of


@validated
class TrustRatio(Stateless):
    """Scale the gradient g of the value w: g * coefficient * |w| / (|g| + eps), in 2-norms.

    The norms are of the group selected by `per`, which is `tensor`, `unit` (an index of axis 0),
    `entry` or an einops pattern such as `o i kh kw -> o i`. The value w is the tensor whose
    gradient is g; sites without one, such as autograd nodes, are refused.

    This is optax's `scale_by_trust_ratio`. With `AddDecayed` before it, g + b w takes the place of
    g (`optax.lars`). LARS of You, Gitman, Ginsburg 2017 (arXiv 1708.03888) divides g + b w by |g| +
    b |w| instead, so that its steps are shorter. LAMB has the coefficient 1 and Adam's update for
    g.

    Any shape; zero stays zero, an empty tensor empty. Where |w| is zero g is not changed. A NaN in
    g or w makes its group NaN; an infinity in g becomes NaN and the rest of its group zero.
    """

    coefficient: Annotated[float, Field(gt=0)] = 1e-3
    _: KW_ONLY
    eps: Annotated[float, Field(ge=0)] = 0.0
    per: Per = "tensor"

    needed = frozenset({"value"})

    tags = frozenset({"odd", "sign_preserving", "deterministic"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"idempotent": self.eps == 0, "elementwise": self.per == "entry"}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        size = norm(value_of(self, context), self.per)
        scaled = self.coefficient * size * direction(grad, self.per, eps=self.eps)
        return torch.where(size == 0, widened(grad), scaled).to(grad.dtype)
