"""Discretize: rounded inputs with a straight-through backward."""

from torch import Tensor, nn


class Discretize(nn.Module):
    """Round to the nearest multiple of `step`; with 0 return the input.

    The gradient passes as if the module were the identity, like in BPDA. The true derivative is
    zero almost everywhere; `gs.Zero()` at this module's input restores it.
    """

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.step:
            return inputs
        rounded = (inputs / self.step).round() * self.step
        return inputs + (rounded - inputs).detach()
