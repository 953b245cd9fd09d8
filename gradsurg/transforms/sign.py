"""Sign: replace every entry by its sign, optionally times the mean magnitude."""

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, mean
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Sign(Stateless):
    """Replace every entry by its sign: sign(g), or sign(g) * mean(abs(g)) with `scale=mean`.

    The mean is over the group selected by `per`, which is `tensor`, `unit` (an index of axis 0),
    `entry` or an einops pattern such as `o i kh kw -> o i`. signSGD of Bernstein et al., ICML 2018
    (arXiv 1802.04434); with `scale=mean` the scaled sign of Karimireddy et al., ICML 2019 (arXiv
    1901.09847). optax has it as `scale_by_sign`.

    Any shape. Zero stays zero and NaN stays NaN (0 in `torch.sign`). An infinity becomes ±1. With
    `scale=mean` a NaN makes its group NaN, and an infinity makes it infinite, and NaN at zeros. An
    empty tensor stays empty.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Sign("mean"))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 3.5000, -3.5000]])
    """

    scale: Literal["none", "mean"] = "none"
    _: KW_ONLY
    per: Per = "tensor"

    tags = frozenset({"odd", "sign_preserving", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        has_no_scale, of_mean = self.scale == "none", self.scale == "mean"
        return {
            "elementwise": has_no_scale,
            "idempotent": has_no_scale,
            "homogeneous": of_mean,
            "norm_non_increasing": of_mean,
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        signs = torch.where(grad.isnan(), grad, grad.sign())
        match self.scale:
            case "none":
                return signs
            case "mean":
                return (signs * mean(grad.abs(), self.per)).to(grad.dtype)
