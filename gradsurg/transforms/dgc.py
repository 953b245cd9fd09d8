"""DGC: sum gradients with momentum, return the largest entries, keep the rest for later."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState
from gradsurg.transforms.mask import largest


@validated
class DGC(Transform):
    """Sum gradients with momentum and return the largest entries of the sum.

    u <- momentum * u + g, then v <- v + u. The result is the fraction `amount` of the entries of v
    that are largest in magnitude, like `Mask`, and zero elsewhere. At the returned entries u and v
    become zero. The optimizer must have no momentum of its own. Deep gradient compression of Lin et
    al., ICLR 2018 (arXiv 1712.01887), without gradient clipping and the warm-up of `amount`.

    u and v are the state of a site, initially zero, in float32 or wider. Any shape; an empty tensor
    stays empty; a zero gradient returns entries of v. A NaN or an infinity is returned first, and
    leaves the state.
    """

    amount: Annotated[float, Field(gt=0, le=1)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    tags = frozenset({"deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        zeros = torch.zeros_like(widened(grad))
        return {"u": zeros, "v": zeros.clone()}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        u = self.momentum * state["u"] + widened(grad)
        v = state["v"] + u
        returned, _ = largest(v.abs(), self.amount, "tensor")
        after = {"u": torch.where(returned, 0.0, u), "v": torch.where(returned, 0.0, v)}
        return torch.where(returned, v, 0.0).to(grad.dtype), after
