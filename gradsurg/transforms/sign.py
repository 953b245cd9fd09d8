"""Sign: replace every entry by its sign."""

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.per import Per, mean
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Sign(Stateless):
    """Replace every entry by its sign, with sign(0) = 0; by `mean`, times mean |g|.

    The mean magnitude |g|_1 / d is that of the tensor or of what `per` keeps apart.

    Any shape. Zero stays zero and NaN stays NaN (`torch.sign` would turn it into 0); an infinity
    becomes ±1 (by `mean` it makes its group infinite, and NaN at the zeros); an empty tensor stays
    empty. signSGD: Bernstein et al., ICML 2018 (arXiv 1802.04434); by `mean`: Karimireddy et al.,
    ICML 2019 (arXiv 1901.09847). optax calls it `scale_by_sign`.
    """

    scale: Literal["none", "mean"] = "none"
    _: KW_ONLY
    per: Per = "tensor"

    @property
    def properties(self) -> frozenset[TransformProperty]:
        properties: set[TransformProperty] = {"odd", "sign_preserving", "deterministic"}
        match self.scale:
            case "none":
                properties |= {"elementwise", "idempotent"}
            case "mean":
                properties |= {"homogeneous", "norm_non_increasing"}
        return frozenset(properties)

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        signs = torch.where(grad.isnan(), grad, grad.sign())
        match self.scale:
            case "none":
                return signs
            case "mean":
                return (signs * mean(grad.abs(), self.per)).to(grad.dtype)
