"""Clip: bound the magnitude of every entry."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext

SMALLEST_MAX = torch.finfo(torch.float16).max
"""A bound up to this is within every dtype: most calls skip `torch.finfo`."""


@validated
class Clip(Stateless):
    """Bound the magnitude of every entry: min(max(g, -value), value).

    Equal to `torch.nn.utils.clip_grad_value_` at parameters. At a recurrent layer's activations it
    is the derivative clipping of Graves 2013 (arXiv 1308.0850).

    Any shape. Zero stays zero, NaN stays NaN, an infinity becomes ±value, an empty tensor stays
    empty. A `value` outside the dtype's range counts as its end.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Clip(0.5))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 0.5000, -0.5000]])
    """

    value: Annotated[float, Field(gt=0)] = 0.01

    tags = frozenset(
        {
            "elementwise",
            "idempotent",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        value = self.value
        if value > SMALLEST_MAX:
            value = min(value, torch.finfo(grad.dtype).max)
        return grad.clamp(-value, value)
