"""Clamp: bound every entry from below and above."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty

SMALLEST_MAX = torch.finfo(torch.float16).max
"""Bounds up to this are within every dtype: most calls skip `torch.finfo`."""


@validated
class Clamp(Stateless):
    """Bound every entry: min(max(g, low), high); None is no bound.

    `Clip` has symmetric bounds.

    Any shape. Zero stays zero if low <= 0 <= high and becomes the nearer bound otherwise. NaN stays
    NaN, an infinity becomes the bound on its side, or stays without one, an empty tensor stays
    empty. A bound outside the dtype's range counts as its end.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Clamp(low=-1.0, high=None))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 3., -1.]])
    """

    low: float | None = -0.01
    high: float | None = 0.01

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise Contradiction("low", "must be a number if high is null")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise Contradiction("low", f"must be <= high, found low={self.low}, high={self.high}")

    tags = frozenset({"elementwise", "idempotent", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        low, high = self.low, self.high
        has_zero = (low is None or low <= 0) and (high is None or high >= 0)
        return {
            "sign_preserving": has_zero,
            "norm_non_increasing": has_zero,
            "odd": low is not None and high is not None and low == -high,
            "homogeneous": {low, high} <= {None, 0.0},
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        low, high, most = self.low, self.high, SMALLEST_MAX
        is_small = (low is None or -most <= low <= most) and (high is None or -most <= high <= most)
        if not is_small:
            most = torch.finfo(grad.dtype).max
            low, high = (
                None if bound is None else min(max(bound, -most), most) for bound in (low, high)
            )
        return grad.clamp(low, high)
