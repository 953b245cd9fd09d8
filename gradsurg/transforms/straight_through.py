"""StraightThrough: replace the derivative of an activation by one."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, norm
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    entering_of,
)


@validated
class StraightThrough(Stateless):
    """Replace the gradient g that leaves a node by e, the gradient that enters it.

    The straight-through estimator of Bengio et al. 2013 (arXiv 1308.3432) at any operation that
    keeps the shape, and at ReLUs the linear backpropagation of Guo, Li, Chen, NeurIPS 2020 (arXiv
    2012.03528). `Nodes` with `side=leave` only. With `rescale` the result for each example, along
    the first axis, has the 2-norm of g: e |g| / |e|. The authors rescale in the same way, but once
    for a whole residual branch.

    Any shape; an empty tensor stays empty. The result is zero where e is zero, and with `rescale`
    for an example whose g is zero. NaN and infinities of e are passed on. With `rescale` a NaN in e
    or g makes the example NaN; an infinity in e becomes NaN and the rest zero; an infinity in g
    makes the example infinite, and NaN where e is zero.
    """

    rescale: bool = False

    needed = frozenset({"entering"})

    tags = frozenset({"homogeneous", "idempotent", "deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        entering = entering_of(self, context)
        if entering.shape != grad.shape:
            raise ValueError(
                f"StraightThrough needs a node that keeps the shape, and '{context.site}' maps "
                f"{list(grad.shape)} to {list(entering.shape)}"
            )
        if self.rescale:
            entering = direction(entering, "unit") * norm(grad, "unit")
        return entering.to(grad.dtype, copy=True)  # the node passes it on too
