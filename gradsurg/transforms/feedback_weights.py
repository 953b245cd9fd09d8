"""FeedbackWeights: send a gradient back through other weights than those of the forward."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    Need,
    Stateless,
    TransformContext,
    TransformProperty,
    entering_of,
)


@validated
class FeedbackWeights(Stateless):
    """e B in place of g = e W, where e is what enters the product of a linear layer: feedback
    alignment, Lillicrap, Cownden, Tweed and Akerman, Nature Communications 2016.

    It acts on what leaves the product for its input, and is refused elsewhere: `site=nodes
    site.pattern=Addmm site.side=leave site.edge=1`, or `Mm` and `site.edge=0` for a layer without
    bias. `site.module` has to leave the first layer out, where nothing goes to the input.

    B is fixed, of the shape of W, uniform within `scale` / sqrt(inputs of the layer) as torch's own
    start of W; it is drawn anew from (seed, site) at each gradient, always the same, so that there
    is no state. A layer that is called twice has one B, but each product inside of one call, as
    of an `nn.RNN`, its own; it is drawn in float32 and rounded, or widened, to the dtype.

    Any shape (..., inputs), where e is (..., outputs). It is made of e alone: where e is zero or
    not finite so is the result, what g is does not matter. An empty tensor stays empty.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"entering", "product"})

    @property
    def properties(self) -> frozenset[TransformProperty]:
        # Homogeneous in all that flows: a loss scale is on what enters too.
        return frozenset({"homogeneous", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        entering, given = torch.atleast_1d(entering_of(self, context)), torch.atleast_1d(grad)
        if entering.shape[:-1] != given.shape[:-1]:
            raise ValueError(
                f"FeedbackWeights: at the site '{context.site}' what leaves, of shape "
                f"{list(grad.shape)}, must be like what enters, {list(entering.shape)}, but for "
                "the last axis: choose with edge what leaves for the input of the product"
            )
        shape = entering.shape[-1], given.shape[-1]
        generator = context.generator(grad.device, anew=False)
        bound = self.scale * max(1, shape[1]) ** -0.5
        # float32 whatever the gradient is: another dtype would draw other numbers.
        weights = torch.empty(shape, dtype=torch.float32, device=grad.device)
        weights = weights.uniform_(-bound, bound, generator=generator).to(grad.dtype)
        return (entering.to(grad.dtype) @ weights).view(grad.shape)
