"""ClipNorm: bound the norm of each gradient."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import NormOrder, Per, multiplied, norm
from gradsurg.transforms.base import Scaling, Stateless, TransformContext, TransformProperty


@validated
class ClipNorm(Stateless, Scaling):
    """Bound the p-norm of each gradient: g * min(1, max_norm / (|g| + eps)).

    Args:

    - `per`: the group of a norm, `tensor`, `unit` (an index of axis 0), `entry` or an einops
      pattern such as `o i kh kw -> o i`.
    - `eps`: 0 by default, 1e-6 in PyTorch's function.
    - `mean`: divide |g| by n^(1/p) for n entries; for p = 2 this is the root mean square.

    Pascanu, Mikolov, Bengio, ICML 2013 (arXiv 1211.5063), one tensor at a time; `ClipGlobalNorm`
    clips all tensors jointly. With `mean` it is optax's `clip_by_block_rms` (Shazeer and Stern,
    ICML 2018, arXiv 1804.04235).

    Any shape. Zero stays zero, an empty tensor empty. A NaN makes its group NaN; an infinity
    becomes NaN and the rest of its group zero.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.ClipNorm(1.0))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 have the norm 5
    tensor([[ 0.6000, -0.8000]])
    """

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    p: NormOrder = 2.0
    per: Per = "tensor"
    eps: Annotated[float, Field(ge=0)] = 0.0
    mean: bool = False

    tags = frozenset(
        {"odd", "sign_preserving", "norm_non_increasing", "deterministic", "differentiable"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"idempotent": self.eps == 0, "elementwise": self.per == "entry"}

    @property
    def acts_on_shards(self) -> bool:
        return self.per == "entry" or (self.per == "tensor" and not self.mean)

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return multiplied(grad, self._factor(grad))

    def factors(
        self, grads: Sequence[Tensor], contexts: Sequence[TransformContext]
    ) -> Sequence[Tensor]:
        return [self._factor(grad) for grad in grads]

    def _factor(self, grad: Tensor) -> Tensor:
        size = norm(grad, self.per, self.p)
        if self.mean and size.numel():
            size = size / (grad.numel() // size.numel()) ** (1 / self.p)
        return (self.max_norm / (size + self.eps)).clamp(max=1.0)
