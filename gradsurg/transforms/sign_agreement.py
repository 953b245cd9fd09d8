"""SignAgreement: keep entries on whose sign the micro-batches of a step agree."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformProperty, TransformState


@validated
class SignAgreement(Transform):
    """Keep entries of the sum of a step's gradients where abs(mean of their signs) >= threshold.

    For gradient accumulation, at `Parameters`: after the n-th backward pass of a step, `.grad` is
    the masked sum G_n of the n gradients so far. Each result is therefore a difference, G_n -
    G_{n-1}, and a single gradient is not changed. `rescale` divides G_n by the fraction of entries
    kept. AND-mask of Parascandolo et al., ICLR 2021 (arXiv 2009.00329), with the micro-batches as
    environments; `rescale` is in their code.

    Any shape; an empty tensor stays empty. A zero entry has the sign 0, which agrees with none. A
    NaN or an infinity makes its entry NaN or infinite for the rest of the step.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] = 1.0
    _: KW_ONLY
    rescale: bool = False

    tags = frozenset({"deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"elementwise": not self.rescale}

    def init(self, grad: Tensor) -> TransformState:
        zeros = torch.zeros_like(widened(grad))
        step, count = torch.tensor([-1, 0], device=grad.device).unbind()
        state = {"sum": zeros, "signs": zeros.clone(), "returned": zeros.clone()}
        return state | {"step": step.clone(), "count": count.clone()}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide = widened(grad)
        step = torch.full_like(state["step"], context.step)
        same = state["step"] == step
        past = {key: torch.where(same, tensor, 0) for key, tensor in state.items()}
        total, signs = past["sum"] + wide, past["signs"] + wide.sign()
        count = past["count"] + 1
        # n times the threshold can exceed n by a rounding error.
        kept = (signs.abs() >= count * (self.threshold * (1 - 1e-6))) | ~total.isfinite()
        target = torch.where(kept, total, 0.0)
        if self.rescale and grad.numel():
            target = target / kept.to(target.dtype).mean().clamp(min=1e-10)
        result = (target - past["returned"]).to(grad.dtype)
        # As autograd adds it to `.grad`, so that a dropped entry becomes exactly zero.
        returned = widened(past["returned"].to(grad.dtype) + result)
        state = {"sum": total, "signs": signs, "returned": returned}
        return result, state | {"step": step, "count": count}
