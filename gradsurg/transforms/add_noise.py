"""AddNoise: add Gaussian noise, decaying over the optimizer steps or constant."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class AddNoise(Stateless):
    """Add Gaussian noise to every entry: g + n, n ~ N(0, eta / (1 + t)^gamma) at step t from 0.

    Args:

    - `eta`: the variance at step 0.
    - `sigma`: if it is given, a constant standard deviation in place of the decaying one.

    Neelakantan et al. 2015 (arXiv 1511.06807), equation 1; the paper uses eta from {0.01, 0.3, 1.0}
    and gamma 0.55.

    Any shape. Zeros get noise as well, NaN and infinities stay, an empty tensor stays empty. The
    noise follows from the surgery's seed, the site and the step; `torch.manual_seed` does not
    change it.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.AddNoise(sigma=0.1)), seed=0).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 3.2419, -4.1359]])
    """

    eta: Annotated[float, Field(gt=0)] = 0.01
    _: KW_ONLY
    gamma: Annotated[float, Field(ge=0)] = 0.55
    sigma: Annotated[float, Field(gt=0)] | None = None

    tags = frozenset({"elementwise", "unbiased", "differentiable"})

    def deviation(self, step: int) -> float:
        """Return the standard deviation of the noise at a step."""
        if self.sigma is not None:
            return self.sigma
        return (self.eta / (1 + step) ** self.gamma) ** 0.5

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        wide = widened(grad)
        noise = torch.randn(
            wide.shape,
            generator=context.generator(grad.device),
            dtype=wide.dtype,
            device=grad.device,
        )
        return (wide + self.deviation(context.step) * noise).to(grad.dtype)
