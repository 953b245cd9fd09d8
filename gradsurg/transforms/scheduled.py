"""Scheduled: blend a transform in or out over the optimizer steps."""

import math
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    AnyTransform,
    TransformContext,
    TransformProperty,
    Wrapper,
)
from gradsurg.transforms.scale import Scale


@validated
class Scheduled(Wrapper):
    """Blend a transform T into the gradient: g + s * (T(g) - g), with strength s at this step.

    T is the field `of`. The strength is s = start + (stop - start) * c(x), where x = (step - begin)
    / steps is clamped to [0, 1], c(0) = 0 and c(1) = 1. In between:

    | `curve` | c(x) |
    |---|---|
    | `linear` | x |
    | `cosine` | (1 - cos(pi x)) / 2 |
    | `saturating` | 2 / (1 + exp(-10 x)) - 1, of Ganin and Lempitsky, ICML 2015 (arXiv 1409.7495) |

    At s = 0 the gradient itself and at s = 1 the result T(g) is returned, bit for bit. s may lie
    outside [0, 1]. T is called at every step, so that its state advances also while s = 0.

    Any shape. Zeros, NaN, infinities and empty tensors become what T makes of them at s = 1. At any
    s other than 0 and 1 an entry that is NaN or infinite in g or in T(g) becomes NaN or infinite.
    """

    of: AnyTransform = Scale(0.0)
    _: KW_ONLY
    start: float = 0.0
    stop: float = 1.0
    begin: Annotated[int, Field(ge=0)] = 0
    steps: Annotated[int, Field(ge=1)] = 1000
    curve: Literal["linear", "cosine", "saturating"] = "linear"

    inherited = frozenset(
        {
            "elementwise",
            "homogeneous",
            "linear",
            "odd",
            "unbiased",
            "deterministic",
            "differentiable",
        }
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        of = self.of.properties
        is_mean = min(self.start, self.stop) >= 0 and max(self.start, self.stop) <= 1
        return {
            "sign_preserving": is_mean and "sign_preserving" in of,
            "norm_non_increasing": is_mean and "norm_non_increasing" in of,
        }

    def strength(self, step: int) -> float:
        """Return the strength s at a step."""
        x = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        if x in (0.0, 1.0):
            return self.stop if x else self.start
        match self.curve:
            case "linear":
                fraction = x
            case "cosine":
                fraction = (1 - math.cos(math.pi * x)) / 2
            case "saturating":
                fraction = 2 / (1 + math.exp(-10 * x)) - 1
        return self.start + (self.stop - self.start) * fraction

    def combine(self, grad: Tensor, result: Tensor, context: TransformContext) -> Tensor:
        strength = self.strength(context.step)
        if strength == 0:
            return grad
        return result if strength == 1 else torch.lerp(grad, result, strength)
