"""AddNoise: add Gaussian noise that fades over the steps, or does not."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.per import widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class AddNoise(Stateless):
    """Add noise of mean 0 and variance eta / (1 + t)^gamma, t the optimizer step from 0.

    eta is a variance; `sigma`, if given, is a fixed standard deviation that takes its place. One
    draw an entry, from the context's generator. Any shape. Zero gets noise too, NaN and infinities
    stay, an empty tensor stays empty. Neelakantan et al. 2015 (arXiv 1511.06807), equation 1, with
    eta one of 0.01, 0.3, 1.0 and gamma 0.55.
    """

    eta: Annotated[float, Field(gt=0)] = 0.01
    _: KW_ONLY
    gamma: Annotated[float, Field(ge=0)] = 0.55
    sigma: Annotated[float, Field(gt=0)] | None = None

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"elementwise", "unbiased"})

    def deviation(self, step: int) -> float:
        """The standard deviation at a step."""
        if self.sigma is not None:
            return self.sigma
        return (self.eta / (1 + step) ** self.gamma) ** 0.5

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        wide = widened(grad)
        noise = torch.randn(
            wide.shape,
            generator=context.generator(grad.device),
            dtype=wide.dtype,
            device=grad.device,
        )
        return (wide + self.deviation(context.step) * noise).to(grad.dtype)
