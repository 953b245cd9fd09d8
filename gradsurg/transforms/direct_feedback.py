"""DirectFeedback: make a gradient of the one at the model's output, by a fixed matrix."""

from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Need, Stateless, TransformContext, TransformProperty, error_of


@validated
class DirectFeedback(Stateless):
    """e B, where e is the gradient of what the model has returned, in place of what came down from
    the layers above: direct feedback alignment, Nokland, NeurIPS 2016 (arXiv 1609.01596).

    It acts on the gradient of each hidden layer's output: `site=outputs site.pattern=*.tanh`. Both
    e and the gradient begin with the axis of the examples. B is fixed, from all outputs to all
    entries of an example here, uniform within `scale` / sqrt(those entries); it is drawn anew from
    (seed, site) at each gradient, always the same, so that there is no state. A module that is
    called twice has one B; it is drawn in float32 and rounded, or widened, to the dtype.

    Any shape. It is made of e alone: where e is zero or not finite so is the result, what came does
    not matter. An empty tensor stays empty.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"error"})

    @property
    def properties(self) -> frozenset[TransformProperty]:
        # Homogeneous in all that flows: a loss scale is on the error too.
        return frozenset({"homogeneous", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        error, given = _examples(error_of(self, context)), _examples(grad)
        if len(error) != len(given):
            raise ValueError(
                f"DirectFeedback: the gradient at the site '{context.site}' has {len(given)} "
                f"examples, its first axis, and what the model has returned {len(error)}"
            )
        shape = error.shape[1], given.shape[1]
        generator = context.generator(grad.device, anew=False)
        bound = self.scale * max(1, shape[1]) ** -0.5
        # float32 whatever the gradient is: another dtype would draw other numbers.
        weights = torch.empty(shape, dtype=torch.float32, device=grad.device)
        weights = weights.uniform_(-bound, bound, generator=generator).to(grad.dtype)
        return (error.to(grad.dtype) @ weights).view(grad.shape)


def _examples(tensor: Tensor) -> Tensor:
    """A row for each example."""
    wide = torch.atleast_1d(tensor)
    return wide.reshape(len(wide), prod(wide.shape[1:]))
