"""Zero: replace the gradient by zeros."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Zero(Stateless):
    """Replace the gradient by zeros, also where it is NaN or infinite.

    At a parameter it freezes the parameter, except for momentum and weight decay of the optimizer.
    At an activation it stops the gradient there.

    Any shape; an empty tensor stays empty.

    >>> layer = nn.Linear(2, 1)
    >>> with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Parameters("weight"))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad, layer.bias.grad
    (tensor([[0., 0.]]), tensor([1.]))
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
