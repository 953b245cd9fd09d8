"""Momentum: replace the gradient by a moving sum or average of past gradients."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Transform, TransformContext, TransformState


@validated
class Momentum(Transform):
    """Replace the gradient by m <- decay * m + g or, with `average`, decay * m + (1 - decay) * g.

    Args:

    - `debias`: divide the average by 1 - decay^n at the n-th gradient.
    - `nesterov`: return decay * m + g or, with `average`, decay * m + (1 - decay) * g.

    Polyak 1964; the division is the bias correction of Kingma and Ba, ICLR 2015 (arXiv 1412.6980),
    section 3. Like optax's `trace` and, with `average`, `ema`. An optimizer with a momentum of its
    own adds a second momentum.

    m is the state of a site, initially zero, in float32 or wider. Any shape; an empty tensor stays
    empty. The result of a zero gradient is decay * m. A NaN or an infinity stays in m: put
    `Sanitize` before it.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Momentum(0.5))).attach(layer):
    ...     for _ in range(3):
    ...         layer.weight.grad = None
    ...         layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 1 + 0.5 + 0.25 times 3, -4
    tensor([[ 5.2500, -7.0000]])
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    _: KW_ONLY
    average: bool = False
    debias: bool = False
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.debias and not self.average:
            raise Contradiction("debias", "must be false with average=false, found true")
        if self.debias and self.nesterov:
            raise Contradiction("debias", "must be false with nesterov=true, found true")

    tags = frozenset({"elementwise", "deterministic", "differentiable"})

    def init(self, grad: Tensor) -> TransformState:
        state = {"momentum": torch.zeros_like(widened(grad))}
        if self.debias:
            state["left"] = torch.ones((), dtype=torch.float64, device=grad.device)
        return state

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        wide = widened(grad) * (1 - self.decay if self.average else 1)
        result = momentum = self.decay * state["momentum"] + wide
        after = {"momentum": momentum}
        if self.debias:
            after["left"] = state["left"] * self.decay
            result = momentum / (1 - after["left"]).to(momentum.dtype)
        if self.nesterov:
            result = self.decay * momentum + wide
        # A result that were the state itself could be written to.
        return (result.clone() if result is momentum else result).to(grad.dtype), after
