"""LowRank: approximate a gradient matrix by one of low rank, by a power iteration."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import norm, widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState

GOLDEN_ANGLE = 2.399963229728653


@validated
class LowRank(Transform):
    """Replace a matrix M by P P^T M, P an orthonormal basis of the `rank` columns of M Q.

    Q is at first a fixed matrix, then M^T P of the last gradient with columns of norm 1. So P
    approaches the leading singular vectors if gradients vary slowly. PowerSGD of Vogels et al.,
    NeurIPS 2019 (arXiv 1905.13727), algorithm 1, is this with `ErrorFeedback`:
    `transform=power_sgd`.

    Q is the state of a site, and is computed in float32 or wider. A tensor of more than two axes is
    a matrix with the rows of axis 0; a tensor of fewer axes is not changed. Zero stays zero, an
    empty tensor stays empty. A NaN or an infinity makes every entry NaN and leaves Q as it was.
    """

    rank: Annotated[int, Field(ge=1)] = 2

    tags = frozenset(
        {"homogeneous", "odd", "norm_non_increasing", "deterministic", "differentiable"}
    )

    def init(self, grad: Tensor) -> TransformState:
        if grad.ndim < 2 or not grad.numel():
            return {}
        columns = grad.numel() // grad.shape[0]
        rank = min(self.rank, columns, grad.shape[0])
        # Quadratic phases look random, and `vmap` refuses to draw.
        phases = torch.arange(1, columns * rank + 1, dtype=torch.float64).square() * GOLDEN_ANGLE
        start = phases.cos().reshape(columns, rank)
        return {"q": start.to(device=grad.device, dtype=widened(grad).dtype)}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        if not state:
            return grad, state
        matrix = widened(grad).reshape(grad.shape[0], -1)
        size = norm(matrix, "tensor", torch.inf)
        unit = matrix / torch.where(size == 0, 1.0, size)
        basis = torch.linalg.qr(unit @ state["q"]).Q
        moved = unit.mT @ basis
        lengths = torch.linalg.vector_norm(moved, dim=0, keepdim=True)
        usable = (lengths > 0) & lengths.isfinite()
        after = torch.where(usable, moved / torch.where(usable, lengths, 1.0), state["q"])
        result = (size * (basis @ moved.mT)).reshape(grad.shape).to(grad.dtype)
        return result, {"q": after}
