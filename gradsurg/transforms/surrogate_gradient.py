"""SurrogateGradient: multiply the gradient by a window of the value, for a step or a spike."""

from dataclasses import KW_ONLY
from math import pi
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty, value_of


@validated
class SurrogateGradient(Stateless):
    """Multiply the gradient by a window of the value x: g * f(k (x - center)), k the slope.

    | `window` | factor, with u = x - center | source |
    |---|---|---|
    | `rectangle` | 1 where abs(k u) <= 1, or 0 | Hubara et al., NeurIPS 2016 (arXiv 1602.02830) |
    | `triangle` | max(0, 1 - k abs(u)) | Esser et al., PNAS 2016 (arXiv 1603.08270) |
    | `sigmoid` | k s (1 - s), s = sigmoid(k u) | Zenke and Ganguli 2018 (arXiv 1705.11146) |
    | `fast_sigmoid` | 1 / (1 + k abs(u))^2 | the same |
    | `arctan` | k / 2 / (1 + (pi k u / 2)^2) | Fang et al., ICCV 2021 (arXiv 2007.05785) |
    | `softplus` | sigmoid(k u) | Dombrowski et al., NeurIPS 2019 (arXiv 1906.07983) |

    Straight-through estimator of Bengio et al. 2013 (arXiv 1308.3432) with a window; the review of
    surrogate gradients is Neftci et al. 2019 (arXiv 1901.09948).

    Use it at a module whose backward passes the gradient through, such as `x + (x.sign() -
    x).detach()`. At its `Inputs`, x is the input. A module with a zero derivative, such as
    `torch.sign`, leaves nothing to multiply.

    `softplus` is the derivative of softplus_k, as zennit's ReLUBetaSmooth. At the `Inputs` of a
    ReLU it needs another intervention, `StraightThrough` at `Nodes("Relu", side="leave")`, because
    the ReLU has set the gradient of negative inputs to zero.

    Any shape; an empty tensor stays empty and zero stays zero. A NaN in g or x makes the entry NaN.
    An infinity in g becomes NaN where the factor is 0, for example outside of a rectangle.
    """

    window: Literal["rectangle", "triangle", "sigmoid", "fast_sigmoid", "arctan", "softplus"] = (
        "rectangle"
    )
    slope: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    center: float = 0.0

    needed = frozenset({"value"})

    tags = frozenset(
        {"elementwise", "homogeneous", "linear", "odd", "sign_preserving", "deterministic"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        peak = {"sigmoid": self.slope / 4, "arctan": self.slope / 2}.get(self.window, 1.0)
        is_mask = self.window == "rectangle"
        return {"norm_non_increasing": peak <= 1, "idempotent": is_mask, "differentiable": is_mask}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        u = self.slope * (widened(value_of(self, context)) - self.center)
        match self.window:
            case "rectangle":
                factor = torch.where(u.isnan(), u, (u.abs() <= 1).to(u.dtype))
            case "triangle":
                factor = (1 - u.abs()).clamp(min=0)
            case "sigmoid":
                factor = self.slope * u.sigmoid() * (-u).sigmoid()
            case "fast_sigmoid":
                factor = (1 + u.abs()).square().reciprocal()
            case "arctan":
                factor = self.slope / 2 / (1 + (pi / 2 * u).square())
            case "softplus":
                factor = u.sigmoid()
        return (widened(grad) * factor).to(grad.dtype)
