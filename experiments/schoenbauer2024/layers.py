"""StraightSign, and a linear layer whose weights are signs."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional


class StraightSign(nn.Module):
    """Return 1 where the input is positive or zero and -1 elsewhere, with an identity gradient."""

    def forward(self, inputs: Tensor) -> Tensor:
        signs = torch.where(inputs >= 0, 1.0, -1.0)
        return inputs + (signs - inputs).detach()


class SignLinear(nn.Module):
    """A linear layer with the signs of `weight` (out, in), divided by sqrt(in), and a bias.

    The weights start uniform between -1 and 1. The input of its module `sign` is `weight`, so a
    transform there is the estimator of the derivative of the sign.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-1, 1))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.sign = StraightSign()

    def forward(self, inputs: Tensor) -> Tensor:
        scale = sqrt(self.weight.shape[1])
        return functional.linear(inputs, self.sign(self.weight) / scale, self.bias)
