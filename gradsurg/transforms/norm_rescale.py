"""NormRescale: rescale the gradient to a fixed norm."""

from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import NormOrder, Per, direction
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class NormRescale(Stateless):
    """Rescale the gradient to a fixed p-norm: norm * g / (|g| + eps).

    |g| is the norm of the group selected by `per`, which is `tensor`, `unit` (an index of axis 0),
    `entry` or an einops pattern such as `o i kh kw -> o i`. With `per=tensor` it is the
    block-normalized gradient of Yu et al. 2017 (arXiv 1707.04822); optax's
    `normalize_by_update_norm` has eps 1e-6 and one norm for all tensors, like `RescaleGlobalNorm`.

    Any shape. A zero gradient stays zero, an empty tensor empty. A NaN makes its group NaN; an
    infinity becomes NaN and the rest of its group zero.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.NormRescale(10.0))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 have the norm 5
    tensor([[ 6., -8.]])
    """

    norm: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    p: NormOrder = 2.0
    per: Per = "tensor"
    eps: Annotated[float, Field(ge=0)] = 0.0

    tags = frozenset({"odd", "sign_preserving", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"idempotent": self.eps == 0, "elementwise": self.per == "entry"}

    @property
    def acts_on_shards(self) -> bool:
        return self.per in ("tensor", "entry")

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return (self.norm * direction(grad, self.per, self.p, self.eps)).to(grad.dtype)
