"""UpdateClip: divide an update by how far the gradient exceeds its second moment."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import (
    Transform,
    TransformContext,
    TransformState,
    gradient_of,
)


@validated
class UpdateClip(Transform):
    """Divide an update u by max(1, r / max_rms), r^2 the mean of g^2 / max(v, eps^2).

    g is the gradient and v the moving average of its squares with `decay`, corrected for its start
    at zero. Over AdamW, with its second beta for `decay`, it is StableAdamW: Wortsman et al.,
    NeurIPS 2023 (arXiv 2304.13013), algorithm 2. Update clipping is by Shazeer and Stern, ICML 2018
    (arXiv 1804.04235), section 5. AdamW's weight decay is part of u and is divided too.

    At `Updates` only. v is the state of a site, in float32 or wider. Any shape; zero stays zero, an
    empty tensor empty. A NaN or an infinity of g^2 makes this update NaN and leaves v as it was.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    _: KW_ONLY
    max_rms: Annotated[float, Field(gt=0)] = 1.0
    eps: Annotated[float, Field(gt=0)] = 1e-8

    needed = frozenset({"gradient"})

    tags = frozenset(
        {"homogeneous", "linear", "odd", "sign_preserving", "norm_non_increasing", "deterministic"}
    )

    def init(self, grad: Tensor) -> TransformState:
        left = torch.ones((), dtype=torch.float64, device=grad.device)
        return {"squares": torch.zeros_like(widened(grad)), "left": left}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        squared = widened(gradient_of(self, context)) ** 2
        left = state["left"] * self.decay
        squares = self.decay * state["squares"] + (1 - self.decay) * squared
        moment = squares / (1 - left).to(squares.dtype)
        after = {"squares": squares, "left": left}
        if not grad.numel():
            return grad, after
        rms = (squared / moment.clamp(min=self.eps**2)).mean().sqrt()
        factor = (rms / self.max_rms).clamp(min=1.0)
        after = {key: torch.where(rms.isfinite(), after[key], state[key]) for key in after}
        return (widened(grad) / factor).to(grad.dtype), after
