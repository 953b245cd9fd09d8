"""Zero: remove the gradient."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Context, Property, Stateless


@validated
class Zero(Stateless):
    """Zeros of the gradient's shape, also where it is NaN or infinite.

    Any shape; an empty tensor stays empty. At a parameter it freezes (an optimizer with momentum
    or weight decay still moves it), at an activation it stops the gradient there.
    """

    @property
    def properties(self) -> frozenset[Property]:
        return frozenset(
            {
                "elementwise",
                "homogeneous",
                "idempotent",
                "linear",
                "odd",
                "sign_preserving",
                "norm_non_increasing",
                "deterministic",
            }
        )

    def apply(self, grad: Tensor, context: Context) -> Tensor:
        return torch.zeros_like(grad)
