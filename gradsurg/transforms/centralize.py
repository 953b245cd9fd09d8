"""Centralize: subtract the mean of each unit."""

from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import Per, mean, widened
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Centralize(Stateless):
    """Subtract the mean of each unit: g - mean(g).

    A unit is an index of axis 0, or another group selected by `per`. A tensor with fewer than two
    axes, such as a bias, is not changed for any `per`. A constant unit becomes zero, a NaN or an
    infinity makes its unit NaN, an empty tensor stays empty. Gradient centralization of Yong,
    Huang, Hua, Zhang, ECCV 2020 (arXiv 2004.01461), equation 1.
    """

    per: Per = "unit"

    def __post_init__(self) -> None:
        if self.per == "entry":
            raise Contradiction("per", "must not be entry: the result would be zero; use Zero")

    tags = frozenset(
        {
            "homogeneous",
            "idempotent",
            "linear",
            "odd",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        if grad.ndim < 2:
            return grad
        return (widened(grad) - mean(grad, self.per)).to(grad.dtype)
