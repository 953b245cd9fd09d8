"""TGR: scale the gradients of tokens, and zero the most extreme token of each channel."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class TGR(Stateless):
    """Multiply by `factor`, and zero the largest and the smallest entry of each channel.

    The gradient has the shape (..., tokens, channels). In each channel of each example two entries
    become zero, at the tokens with the largest and the smallest gradient. Token gradient
    regularization of Zhang et al., CVPR 2023 (arXiv 2303.15754), for the inputs of the MLPs (factor
    0.5) and of the layers of queries, keys and values (0.75) of a vision transformer. The authors
    take the tokens of the first example for a whole batch, here each example has its own tokens.

    Any shape; a vector has one channel, a scalar one token. Of equal extremes the first is zeroed.
    In a channel with a NaN no entry is zeroed. An infinity is an extreme. An empty tensor stays
    empty.
    """

    factor: Annotated[float, Field(ge=0)] = 0.5

    tags = frozenset({"homogeneous", "odd", "sign_preserving", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"norm_non_increasing": self.factor <= 1}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        scaled = grad * self.factor
        if not grad.numel():
            return scaled
        axis = -2 if grad.ndim > 1 else -1
        extreme = torch.zeros_like(grad, dtype=torch.bool)
        for place in (grad.argmax(axis, keepdim=True), grad.argmin(axis, keepdim=True)):
            extreme = extreme.scatter(axis, place, True)
        return torch.where(extreme & ~grad.isnan(), torch.zeros_like(grad), scaled)
