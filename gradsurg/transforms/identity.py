"""Identity: leave the gradient as it is."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Identity(Stateless):
    """The gradient itself, the same object: g.

    Any shape; zero, NaN, infinities and empty tensors pass. Training under it is bit-identical to
    training without surgery.
    """

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset(
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
            }
        )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad
