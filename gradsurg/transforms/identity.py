"""Identity: do not change the gradient."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Identity(Stateless):
    """Return the gradient, the same object.

    Any shape; zeros, NaN, infinities and empty tensors are not changed. Training with it is
    bit-identical to training without surgery.
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
