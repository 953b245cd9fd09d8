"""Placebo: a random change of the gradient, as large and at the same angle as a transform's."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, norm, widened
from gradsurg.transforms.base import AnyTransform, TransformContext, Wrapper
from gradsurg.transforms.scale_by_sign import ScaleBySign


@validated
class Placebo(Wrapper):
    """Change each gradient in a random direction, with the cosine and norm of a transform's result.

    A control arm for the transform T (the field `of`). The result is p + |T(g) - p| r, where p = (u
    . T(g)) u is the part of T(g) along u = g / |g|. The direction r is random with |r| = 1 and r .
    g = 0, drawn uniformly for each (seed, site, step, call). The result has the cosine to g and the
    norm of T(g). Where T(g) = g the result is g, bit for bit.

    Any shape. A gradient of zeros, which has no direction, becomes |T(g)| r. A tensor with one
    entry has no direction orthogonal to it, and its result is T(g). A NaN or an infinity in g or
    T(g) makes every entry NaN. An empty tensor stays empty. The state is the state of T.
    """

    of: AnyTransform = ScaleBySign()

    inherited = frozenset({"homogeneous", "norm_non_increasing", "differentiable"})

    def combine(self, grad: Tensor, result: Tensor, context: TransformContext) -> Tensor:
        # Another key than that of T, which may draw the same numbers.
        generator = context.inside("placebo").generator(grad.device)
        unit, wide = direction(grad, "tensor"), widened(result)
        noise = torch.randn(grad.shape, dtype=unit.dtype, device=grad.device, generator=generator)
        for _ in range(2):  # once leaves a rounding error along g, which is large if r is nearly g
            noise = noise - (noise * unit).sum() * unit
        along = (wide * unit).sum() * unit
        rest = norm(wide - along, "tensor")
        turned = (along + rest * direction(noise, "tensor")).to(grad.dtype)
        return torch.where((result == grad).all(), grad, turned)
