"""Curve: pass every entry through an odd function."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Curve(Stateless):
    """Pass every entry through an odd, increasing function with the parameter a (`amount`).

    | `by` | f(g) |
    |---|---|
    | `tanh` | a tanh(g / a) |
    | `softsign` | g / (1 + abs(g) / a) |
    | `log` | a sign(g) log(1 + abs(g) / a) |
    | `power` | sign(g) abs(g)^a; GradPower of Wang et al. 2025 (arXiv 2505.24275) has a = 1.2 |
    | `soft_threshold` | sign(g) max(abs(g) - a, 0), Donoho 1995 |

    Any shape. Zero stays zero, NaN stays NaN, an empty tensor stays empty. An infinity becomes ±a
    by `tanh` and `softsign` and stays infinite by the others.
    """

    by: Literal["tanh", "softsign", "log", "power", "soft_threshold"] = "tanh"
    amount: Annotated[float, Field(ge=1e-30)] = 1.0

    tags = frozenset({"elementwise", "odd", "sign_preserving", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"norm_non_increasing": self.by != "power"}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        g, a = widened(grad), self.amount
        size = g.abs()
        match self.by:
            case "tanh":
                result = a * (g / a).tanh()
            case "softsign":
                # inf / inf has no value, and size / a may be infinite.
                result = torch.where(size.isinf(), a * g.sign(), a * (g / (a + size)))
            case "log":
                result = a * (size / a).log1p() * _signs(g)
            case "power":
                result = size**a * _signs(g)
            case "soft_threshold":
                result = (size - a).clamp(min=0) * _signs(g)
        limit = torch.finfo(grad.dtype).max
        finite = result.clamp(-limit, limit)  # a power can overflow, also in a narrow dtype
        return torch.where(g.isinf(), result, finite).to(grad.dtype)


def _signs(grad: Tensor) -> Tensor:
    return torch.where(grad.isnan(), grad, grad.sign())
