"""Centralize: subtract the mean of each unit."""

from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import Per, mean, widened
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Centralize(Stateless):
    """Subtract the mean of each unit: g - mean(g).

    A unit is an index of axis 0; `per` selects other groups: `tensor` or an einops pattern such as
    `o i kh kw -> o i`. Gradient centralization of Yong, Huang, Hua, Zhang, ECCV 2020 (arXiv
    2004.01461), equation 1.

    A tensor with fewer than two axes, such as a bias, is not changed for any `per`. A constant unit
    becomes zero, a NaN makes its unit NaN, an empty tensor stays empty. An infinity becomes NaN and
    the rest of its unit infinite.

    >>> layer = nn.Linear(2, 1)
    >>> with gs.Surgery(gs.Intervention(gs.Centralize())).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad, layer.bias.grad  # the mean of 3 and -4 is -0.5
    (tensor([[ 3.5000, -3.5000]]), tensor([1.]))
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
