"""Quantize: round every entry at random to one of a few levels."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, direction, mean, norm, widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Quantize(Stateless):
    """Round abs(g) to a multiple of N / levels, up or down at random, without bias.

    Args:

    - `by`: N is the largest magnitude (`max`) or the 2-norm (`norm`) of the entries of a group.
    - `per`: the group, `tensor`, `unit` (an index of axis 0), `entry` or an einops pattern such as
      `o i kh kw -> o i`.
    - `clip`: first clamp entries to this number of standard deviations, which makes the result
      biased.
    - `stochastic`: with `false` round to the nearest level.

    An entry of magnitude x N / levels becomes sign(g) floor(x + u) N / levels, u uniform in [0, 1).
    With 2^(b-1) - 1 levels of the largest magnitude an entry takes b bits. QSGD of Alistarh et al.,
    NeurIPS 2017 (arXiv 1610.02132), has `by=norm`. TernGrad of Wen et al., NeurIPS 2017 (arXiv
    1705.07878), has one level and `clip` 2.5.

    Any shape; zero stays zero, an empty tensor stays empty. A NaN or an infinity makes its group
    NaN.
    """

    levels: Annotated[int, Field(ge=1, le=2**20)] = 127
    _: KW_ONLY
    by: Literal["max", "norm"] = "max"
    clip: Annotated[float, Field(gt=0)] | None = None
    per: Per = "tensor"
    stochastic: bool = True

    tags = frozenset({"odd", "sign_preserving"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {
            "homogeneous": self.stochastic,  # else an entry between two levels may go either way
            "unbiased": self.stochastic and self.clip is None,
            "deterministic": not self.stochastic,
            # With `clip`, a deviation of 0 has no derivative.
            "differentiable": not self.stochastic and self.clip is None,
            "idempotent": not self.stochastic and (self.by, self.clip) == ("max", None),
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        wide = widened(grad)
        if self.clip is not None:
            size = norm(wide, self.per, torch.inf)
            unit = wide / torch.where(size == 0, 1.0, size)  # a square could overflow
            deviation = mean((unit - mean(unit, self.per)).square(), self.per).sqrt()
            bound = self.clip * size * deviation
            wide = wide.clamp(-bound, bound)
        match self.by:
            case "max":
                p = torch.inf
            case "norm":
                p = 2.0
        unit = direction(wide, self.per, p)
        x = self.levels * unit.abs()
        if self.stochastic:
            generator = context.generator(grad.device)
            draws = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            rounded = (x + draws).floor()
        else:
            rounded = x.round()
        result = norm(wide, self.per, p) * (rounded / self.levels) * unit.sign()
        return result.to(grad.dtype)
