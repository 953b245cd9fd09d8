"""FeedbackWeights: feedback alignment, backpropagation through fixed random weights."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    entering_of,
    fixed_weights,
)


@validated
class FeedbackWeights(Stateless):
    """Replace the gradient e W of a linear layer's input by e B, B a fixed random matrix.

    e is the gradient of the layer's output. Use it at the edge from the matrix product to its
    input: `site=nodes site.pattern=Addmm site.side=leave site.edge=1`, or `Mm` with `site.edge=0`
    for a layer without bias. Other sites are refused. `site.module` has to exclude the first layer,
    whose input has no gradient.

    B has the shape of W and entries uniform in ±scale / sqrt(inputs), the bound of
    `nn.Linear.reset_parameters`. B is a function of (seed, site), drawn in float32 at each call and
    cast to the gradient's dtype, so that there is no state. All calls of a layer have the same B,
    but each product within a call, for example of `nn.RNN`, has its own. Feedback alignment of
    Lillicrap, Cownden, Tweed and Akerman, Nature Communications 2016.

    Any shape (..., inputs), with e of shape (..., outputs). The result does not depend on the
    incoming gradient: it is zero or not finite where e B is. An empty tensor stays empty.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0

    needed = frozenset({"entering", "product"})

    tags = frozenset({"homogeneous", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        entering, given = torch.atleast_1d(entering_of(self, context)), torch.atleast_1d(grad)
        if entering.shape[:-1] != given.shape[:-1]:
            raise ValueError(
                f"FeedbackWeights: at the site '{context.site}' the gradient, of shape "
                f"{list(grad.shape)}, and the node's output, {list(entering.shape)}, may differ in "
                "the last axis only. Select the edge to the input of the product"
            )
        weights = fixed_weights(context, self.scale, entering.shape[-1], given)
        return (entering.to(grad.dtype) @ weights).view(grad.shape)
