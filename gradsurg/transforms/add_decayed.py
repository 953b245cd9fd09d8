"""AddDecayed: add the gradient of a penalty on the weights."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty, value_of


@validated
class AddDecayed(Stateless):
    """Add a penalty's gradient: g + strength * w (`l2`) or g + strength * sign(w) (`l1`).

    This is L2 regularization, which differs from decoupled weight decay in adaptive optimizers:
    Loshchilov and Hutter, ICLR 2019 (arXiv 1711.05101), algorithm 1. optax has it as
    `add_decayed_weights`. The value w is the tensor whose gradient is g, usually a parameter; sites
    without one, such as autograd nodes, are refused.

    Any shape. A zero gradient becomes the penalty's, an empty tensor stays empty. A NaN or an
    infinity in g stays, and in w too, except that with `l1` the sign of an infinity is ±1.
    """

    strength: Annotated[float, Field(ge=0)] = 1e-2
    penalty: Literal["l2", "l1"] = "l2"

    needed = frozenset({"value"})

    tags = frozenset({"elementwise", "deterministic"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"differentiable": self.penalty == "l1"}  # sign(w) is constant but at 0

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        value = widened(value_of(self, context))
        match self.penalty:
            case "l2":
                slope = value
            case "l1":
                slope = torch.where(value.isnan(), value, value.sign())  # `sign` has 0 for NaN
        return (widened(grad) + self.strength * slope).to(grad.dtype)
