"""AGC: adaptive gradient clipping, unit-wise relative to the norm of the weights."""

from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, norm, widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty, value_of


@validated
class AGC(Stateless):
    """Clip the gradient g of each unit w: g * min(1, clipping * max(|w|, eps) / |g|), in 2-norms.

    A unit is an index of axis 0: weights of shapes (out, in), (out, in, k) and (out, in, kh, kw)
    have `out` units. A tensor with fewer than two axes is one unit. `per` selects other groups:
    `tensor`, `entry` or an einops pattern such as `o i kh kw -> o i`. In timm the units are the
    same; in optax a weight with at most one axis longer than 1, such as (out, 1), is one unit. The
    value w is the tensor whose gradient is g; sites without one, such as autograd nodes, are
    refused.

    Adaptive gradient clipping of Brock, De, Smith, Simonyan, ICML 2021 (arXiv 2102.06171), equation
    3. The paper does not clip the last linear layer. Its code divides by max(|g|, 1e-6), which
    differs only where clipping * max(|w|, eps) < 1e-6.

    A zero gradient stays zero, an empty tensor empty. A NaN in g or w makes its unit NaN; an
    infinity in g becomes NaN and the rest of its unit zero.
    """

    clipping: Annotated[float, Field(gt=0)] = 0.01
    _: KW_ONLY
    eps: Annotated[float, Field(gt=0)] = 1e-3
    per: Per = "unit"

    needed = frozenset({"value"})

    tags = frozenset(
        {"idempotent", "odd", "sign_preserving", "norm_non_increasing", "deterministic"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"elementwise": self.per == "entry"}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        bound = self.clipping * norm(value_of(self, context), self.per).clamp(min=self.eps)
        factor = bound / norm(grad, self.per)
        return (widened(grad) * factor.clamp(max=1.0)).to(grad.dtype)
