"""Scheduled: a transform whose strength changes over the optimizer steps."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    Wrapper,
    as_transform,
    init_all,
    update_all,
)
from gradsurg.transforms.scale import Scale


@validated
class Scheduled(Wrapper):
    """Blend a transform T (`of`) in or out: g + s * (T(g) - g), s the strength at this step.

    s is `start` up to step `begin`, `stop` from step `begin + steps` on, and follows `curve`
    between them: with x from 0 to 1, `linear` x, `cosine` (1 - cos(pi x)) / 2, `saturating`
    2 / (1 + exp(-10 x)) - 1, the curve of Ganin and Lempitsky, ICML 2015 (arXiv 1409.7495), which
    ends at 0.9999. s may leave [0, 1].

    Any shape; zero, NaN, infinities and empty tensors as T has them while s is not 0. At s = 0 the
    gradient itself is returned, whatever T makes of it; at s = 1 T(g) itself, both bit for bit. T
    is called at every step, so that its state is warm when its turn comes.
    """

    of: Annotated[Transform, BeforeValidator(as_transform)] = Scale(0.0)
    _: KW_ONLY
    start: float = 0.0
    stop: float = 1.0
    begin: Annotated[int, Field(ge=0)] = 0
    steps: Annotated[int, Field(ge=1)] = 1000
    curve: Literal["linear", "cosine", "saturating"] = "linear"

    @property
    def properties(self) -> frozenset[TransformProperty]:
        kept: set[TransformProperty] = {"elementwise", "homogeneous", "linear", "odd", "unbiased"}
        kept |= {"deterministic"}
        if min(self.start, self.stop) >= 0 and max(self.start, self.stop) <= 1:
            kept |= {"sign_preserving", "norm_non_increasing"}
        return self.of.properties & kept

    def strength(self, step: int) -> float:
        """s at a step."""
        x = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        if x in (0.0, 1.0):
            return self.stop if x else self.start
        match self.curve:
            case "linear":
                share = x
            case "cosine":
                share = (1 - math.cos(math.pi * x)) / 2
            case "saturating":
                share = 2 / (1 + math.exp(-10 * x)) - 1
        return self.start + (self.stop - self.start) * share

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return init_all(self.of, grads)

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        results, state = update_all(self.of, grads, state, contexts)
        blended = [
            _blend(grad, result, self.strength(context.step))
            for grad, result, context in zip(grads, results, contexts, strict=True)
        ]
        return blended, state


def _blend(grad: Tensor, result: Tensor, strength: float) -> Tensor:
    if strength == 0:
        return grad
    return result if strength == 1 else torch.lerp(grad, result, strength)
