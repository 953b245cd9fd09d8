"""Linear: a linear map without bias that starts at zero."""

from math import prod

import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.models.mlp import MLPOptions


class Linear(nn.Module):
    """Flatten, then a linear map without bias whose `weight` starts at zero.

    Gradient descent from zero stays in the span of the examples.
    """

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        options = MLPOptions(input_shape, num_outputs)
        self.flatten = Rearrange("batch ... -> batch (...)")
        self.weight = nn.Parameter(torch.zeros(options.num_outputs, prod(options.input_shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(self.flatten(inputs), self.weight)
