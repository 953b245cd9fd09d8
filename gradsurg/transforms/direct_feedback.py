"""DirectFeedback: direct feedback alignment, the output error through a fixed random matrix."""

from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import FieldError, validated
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    error_of,
    fixed_weights,
)


@validated
class DirectFeedback(Stateless):
    """Replace the gradient by e B: e the gradient of the model's output, B a fixed random matrix.

    Use it at the outputs of the hidden layers, for example `site=outputs site.pattern=*.tanh`. Axis
    0 of both e and the gradient has the examples. For outputs of m entries and a gradient of n
    entries per example B has shape (m, n) and entries uniform in ±scale / sqrt(n). B is a function
    of (seed, site), drawn in float32 at each call and cast to the gradient's dtype, so that there
    is no state; all calls of a module have the same B. Direct feedback alignment of Nokland,
    NeurIPS 2016 (arXiv 1609.01596).

    Any shape. The result does not depend on the incoming gradient: it is zero or not finite where e
    B is. An empty tensor stays empty.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0

    needed = frozenset({"error"})

    tags = frozenset({"homogeneous", "idempotent"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        error, given = _examples(error_of(self, context)), _examples(grad)
        if len(error) != len(given):
            text = (
                "needs the same number of examples (axis 0) in the model's output and at the site "
                f"'{context.site}', found {len(error)} and {len(given)}"
            )
            raise FieldError(self, [("", text)])
        weights = fixed_weights(context, self.scale, error.shape[1], given)
        return (error.to(grad.dtype) @ weights).view(grad.shape)


def _examples(tensor: Tensor) -> Tensor:
    """Return a matrix with a row for each example."""
    wide = torch.atleast_1d(tensor)
    return wide.reshape(len(wide), prod(wide.shape[1:]))
