"""Identity: do not change the gradient."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Identity(Stateless):
    """Return the gradient, the same object.

    Training with it is bit-identical to training without surgery: attach it to measure gradients,
    or as a control.

    Any shape; zeros, NaN, infinities and empty tensors are not changed.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Identity())).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad
    tensor([[ 3., -4.]])
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
            "unbiased",
            "deterministic",
            "differentiable",
        }
    )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad
