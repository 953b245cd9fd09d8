"""Deconvolve: replace the derivative of an activation by the ReLU of the gradient."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    entering_of,
)


@validated
class Deconvolve(Stateless):
    """Replace the gradient that leaves a node by max(e, 0), e the gradient that enters it.

    This is the rule of deconvolutional networks at a ReLU: the mask of the forward pass is ignored.
    At a node of another operation that keeps the shape, it replaces the derivative of that
    operation. `Nodes` with `side=leave` only. `ScaleBySign` at ReLU nodes keeps the mask of the
    forward pass too: guided backpropagation. Zeiler and Fergus, ECCV 2014 (arXiv 1311.2901),
    section 2.1, like captum's `Deconvolution`.

    Any shape; an empty tensor stays empty. For e: zero stays zero, NaN stays NaN, infinity stays,
    -infinity becomes zero.
    """

    needed = frozenset({"entering"})

    tags = frozenset({"homogeneous", "idempotent", "deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        entering = entering_of(self, context)
        if entering.shape != grad.shape:
            raise ValueError(
                f"Deconvolve needs a node that keeps the shape, and '{context.site}' maps "
                f"{list(grad.shape)} to {list(entering.shape)}"
            )
        return entering.relu().to(grad.dtype)
