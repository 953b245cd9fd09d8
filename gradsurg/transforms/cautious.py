"""Cautious: keep the entries of an update that descend along the current gradient."""

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    TransformProperty,
    gradient_of,
)


@validated
class Cautious(Stateless):
    """Zero the entries of an update u that increase the loss to first order, and scale the rest.

    Args:

    - `mode`: with `sign` nothing is zeroed or scaled, and the result is -|u| sign(g).

    The mask is m = [u g < 0], where g is the gradient. An update is added to the parameter, so it
    descends where its sign differs from the sign of g. The result is u m c. If k of the n entries
    are kept, c is:

    | `scale` | c | source |
    |---|---|---|
    | `mean` | n / max(k, n / 1000) | the authors' code |
    | `paper` | n / (k + 1) | Liang et al. 2024 (arXiv 2411.16085), algorithm 1 |
    | `count` | n / max(k, 1) | HeavyBall |
    | `none` | 1 | the mask alone |

    `mode="sign"` has the size of the update and the direction of the gradient: Grams of Cao et al.
    2024 (arXiv 2412.17107).

    At `Updates` only. u contains the weight decay; the authors mask the step without it. Any shape.
    An entry where u is zero, or g is zero or NaN, becomes zero (with `mode=sign` NaN if u is
    infinite); a NaN of u stays, and so does an infinity that is kept. An empty tensor stays empty.
    """

    scale: Literal["mean", "paper", "count", "none"] = "mean"
    _: KW_ONLY
    mode: Literal["mask", "sign"] = "mask"

    needed = frozenset({"gradient"})

    tags = frozenset({"deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        flips, scales = self.mode == "sign", self.scale != "none"
        return {
            "homogeneous": not flips,
            "sign_preserving": not flips,
            "elementwise": flips or not scales,
            "idempotent": not flips and not scales,
            "norm_non_increasing": not flips and not scales,
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        if self.mode == "sign":
            return -grad.abs() * gradient_of(self, context).sign().to(grad.dtype)
        # The product of two tiny numbers would be zero.
        keeps = grad.sign() * gradient_of(self, context).sign().to(grad.dtype) < 0
        keeps |= grad.isnan()
        wide, entries = widened(grad), grad.numel()
        kept = keeps.sum().to(wide.dtype)  # a quotient of integers would be float32
        match self.scale:
            case "mean":
                factor = entries / kept.clamp(min=entries / 1000 or 1)
            case "paper":
                factor = entries / (kept + 1)
            case "count":
                factor = entries / kept.clamp(min=1)
            case "none":
                return torch.where(keeps, grad, torch.zeros_like(grad))
        return torch.where(keeps, wide * factor, 0.0).to(grad.dtype)
