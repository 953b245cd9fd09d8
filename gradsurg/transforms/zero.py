"""Zero: replace the gradient by zeros."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Zero(Stateless):
    """Replace the gradient by zeros, also where it is NaN or infinite.

    Any shape; an empty tensor stays empty. At a parameter it freezes the parameter, except for
    momentum and weight decay of the optimizer; at an activation it stops the gradient there.
    """

    tags = frozenset(
        {
            "elementwise",
            "homogeneous",
            "idempotent",
            "linear",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return torch.zeros_like(grad)
