"""MLP: linear layers with an activation between them."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from einops.layers.torch import Rearrange
from pydantic import Field
from torch import Tensor, nn

from gradsurg.fields import validated

Activation = Literal["relu", "tanh", "gelu"]
Size = Annotated[int, Field(gt=0)]


@validated
class MLPOptions:
    """What an `MLP` is made of."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    hidden: Sequence[Size] = (64, 64)
    activation: Activation = "relu"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class MLP(nn.Module):
    """Flatten, then `hidden` layers, then a linear readout; `hidden=()` is a linear model.

    Its modules are `hidden.0.linear`, `hidden.0.relu` (and `.dropout`), ..., `output`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        options = MLPOptions(input_shape, num_outputs, hidden, activation, dropout)
        widths = [prod(options.input_shape), *options.hidden]
        self.flatten = Rearrange("batch ... -> batch (...)")
        self.hidden = nn.Sequential(
            *(_layer(before, after, options) for before, after in pairwise(widths))
        )
        self.output = nn.Linear(widths[-1], options.num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.hidden(self.flatten(inputs)))


def _layer(before: int, after: int, options: MLPOptions) -> nn.Sequential:
    layer = OrderedDict[str, nn.Module](linear=nn.Linear(before, after))
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
