"""MLP: linear layers with an activation between them."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import torch
from einops.layers.torch import Rearrange
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import validated

Activation = Literal["relu", "tanh", "gelu"]
Init = Literal["torch", "zero", "normal", "fan_out"]
Size = Annotated[int, Field(gt=0)]


@validated
class MLPOptions:
    """The checked arguments of `MLP`."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    hidden: Sequence[Size] = (64, 64)
    activation: Activation = "relu"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init: Init = "torch"
    init_std: Annotated[float, Field(gt=0)] = 0.1
    separate_bias: bool = False


class SeparateBias(nn.Linear):
    """A linear layer that adds its bias in a separate operation.

    A hook on the product's gradient then does not affect the bias.
    """

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class MLP(nn.Module):
    """Flatten, then `hidden` layers, then a linear readout; `hidden=()` is a linear model.

    Its modules are `hidden.0.linear`, `hidden.0.relu` (and `.dropout`), ..., `output`. `init` sets
    all weights and biases: `torch` is PyTorch's default, `zero` sets zeros, `normal` has the
    deviation `init_std`, and `fan_out` is uniform within 1 / sqrt(outputs of the layer). With
    `separate_bias` a layer is a product and then a sum, two autograd nodes.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = "relu",
        dropout: float = 0.0,
        init: Init = "torch",
        init_std: float = 0.1,
        separate_bias: bool = False,
    ) -> None:
        super().__init__()
        options = MLPOptions(
            input_shape, num_outputs, hidden, activation, dropout, init, init_std, separate_bias
        )
        widths = [prod(options.input_shape), *options.hidden]
        self.flatten = Rearrange("batch ... -> batch (...)")
        self.hidden = nn.Sequential(
            *(_layer(before, after, options) for before, after in pairwise(widths))
        )
        self.output = _linear(widths[-1], options.num_outputs, options)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.hidden(self.flatten(inputs)))


def _layer(before: int, after: int, options: MLPOptions) -> nn.Sequential:
    layer = OrderedDict[str, nn.Module](linear=_linear(before, after, options))
    match options.activation:
        case "relu":
            layer["relu"] = nn.ReLU()
        case "tanh":
            layer["tanh"] = nn.Tanh()
        case "gelu":
            layer["gelu"] = nn.GELU()
    if options.dropout:
        layer["dropout"] = nn.Dropout(options.dropout)
    return nn.Sequential(layer)


@torch.no_grad()
def _linear(before: int, after: int, options: MLPOptions) -> nn.Linear:
    linear = (SeparateBias if options.separate_bias else nn.Linear)(before, after)
    for parameter in linear.parameters():
        match options.init:
            case "torch":
                pass
            case "zero":
                parameter.zero_()
            case "normal":
                parameter.normal_(std=options.init_std)
            case "fan_out":
                parameter.uniform_(-(after**-0.5), after**-0.5)
    return linear
