"""Sanitize: remove NaN and infinities."""

from typing import Literal

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class Sanitize(Stateless):
    """Remove NaN and infinities; a finite gradient is not changed.

    | `on_nonfinite` | result |
    |---|---|
    | `zero` | NaN and infinities become 0 |
    | `clamp` | NaN becomes 0, ±infinity becomes ± the largest finite magnitude of the gradient |
    | `drop` | the whole gradient becomes 0 if one entry is not finite |

    With a `GradScaler` it is refused at stages before `step`. There it would hide the overflow of
    scaled gradients, by which the scaler decides to skip a step. optax's `zero_nans` keeps
    infinities; `torch.nan_to_num` replaces them by the largest number of the dtype.

    Any shape; an empty tensor stays empty. The result is finite.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Sanitize())).attach(layer):
    ...     layer(torch.tensor([3.0, torch.inf])).backward()
    >>> layer.weight.grad  # 3, inf without the surgery
    tensor([[3., 0.]])
    """

    on_nonfinite: Literal["zero", "clamp", "drop"] = "zero"

    # Neither homogeneous nor linear: where c * g overflows, so does c * T(g), but not T(c * g).
    tags = frozenset(
        {
            "idempotent",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"elementwise": self.on_nonfinite == "zero"}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        finite = grad.isfinite()
        zeroed = torch.where(finite, grad, 0.0)
        match self.on_nonfinite:
            case "zero":
                return zeroed
            case "clamp":
                largest = zeroed.abs().amax() if grad.numel() else 0.0
                return torch.where(grad.isinf(), grad.sign() * largest, zeroed)
            case "drop":
                return torch.where(finite.all(), zeroed, 0.0)
