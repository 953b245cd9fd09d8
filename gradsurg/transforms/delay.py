"""Delay: return the gradient of an earlier step."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class Delay(Transform):
    """Return the gradient that the site had `steps` gradients before; zero for the first ones.

    The stale gradient of asynchronous training, with a constant delay: Recht et al., NeurIPS 2011
    (arXiv 1106.5730). With several backward passes per step use `Parameters(stage="step")`, so that
    each gradient is the gradient of a step.

    Any shape; an empty tensor stays empty. Zeros, NaN and infinities come out `steps` gradients
    later. The state of a site is `steps` gradients, in float32 or wider.
    """

    steps: Annotated[int, Field(ge=1)] = 1

    tags = frozenset({"elementwise", "deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return {"past": grad.new_zeros((self.steps, *grad.shape), dtype=dtype)}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        past = state["past"]
        result = past[0].to(grad.dtype, copy=True)
        return result, {"past": torch.cat([past[1:], grad.to(past.dtype)[None]])}
