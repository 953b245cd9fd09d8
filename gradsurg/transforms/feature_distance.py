"""FeatureDistance: add the gradient of the distance of a feature from its first value."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, widened
from gradsurg.transforms.base import (
    Transform,
    TransformContext,
    TransformState,
    value_of,
)


@validated
class FeatureDistance(Transform):
    """Add strength * dD/dz, with D the sum over the examples of |T(z) - T(z0)|.

    Here T(z) = sign(z) |z|^power. The value z at the site has one example for each index of axis 0,
    and z0 is the value at the site's first gradient. An attack that starts from the clean images
    then ascends the loss plus the distances D of all sites. With power 0.5 it makes the
    transferable adversarial perturbations of Zhou et al., ECCV 2018, section 3. It leaves out the
    smoothing that they add at the images.

    z0 is the state of a site: attach the surgery anew for other images. At a feature of zero T has
    no derivative, and 0 is used, also where T(z) = T(z0). A NaN or an infinity of z or z0 gives NaN
    in its example; a NaN or an infinity of the gradient stays. An empty tensor stays empty.

    Raises ValueError if z has another shape than z0.
    """

    strength: float = 1.0
    _: KW_ONLY
    power: Annotated[float, Field(gt=0, le=1)] = 1.0

    needed = frozenset({"value"})

    tags = frozenset({"elementwise", "deterministic"})

    def init(self, grad: Tensor) -> TransformState:
        first = torch.ones((), dtype=torch.bool, device=grad.device)
        return {"reference": torch.zeros_like(widened(grad)), "first": first}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        value = widened(value_of(self, context))
        reference = torch.where(state["first"], value, state["reference"])
        after = {"reference": reference, "first": torch.zeros_like(state["first"])}
        away = direction(self._powered(value) - self._powered(reference), "unit")
        if self.power != 1:
            size = torch.where(value == 0, 1.0, value.abs())
            slope = self.power * size ** (self.power - 1)
            away = torch.where(value == 0, 0.0, away * slope)
        return (widened(grad) + self.strength * away).to(grad.dtype), after

    def _powered(self, value: Tensor) -> Tensor:
        return value if self.power == 1 else value.sign() * value.abs() ** self.power
