"""Multi head: a trunk shared by all losses, and a linear head for each."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from gradsurg.models.convnet import Convnet
from gradsurg.models.mlp import MLP
from gradsurg.plugins.fields import Contradiction, validated

Size = Annotated[int, Field(gt=0)]
Trunk = Literal["mlp", "convnet"]
Activation = Literal["relu", "tanh", "sigmoid"]


@validated
class MultiHeadOptions:
    """The checked arguments of `MultiHead`."""

    input_shape: tuple[int, ...]
    num_outputs: Size
    heads: tuple[Size, ...]
    trunk: Trunk = "mlp"
    width: Size = 64
    hidden: Sequence[Size] = (64,)
    channels: Sequence[Size] = (16, 32)
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        if sum(self.heads) != self.num_outputs:
            rule = f"must be {self.num_outputs} outputs together, found {self.heads}"
            raise Contradiction("heads", rule)


class MultiHead(nn.Module):
    """An MLP of `hidden` layers or a convnet of `channels`, `width` features, and linear heads.

    All losses share `trunk` and the `activation` of its features, a module of that name; each of
    `heads.0`, `heads.1` and so on belongs to one loss. Returns a tuple with the outputs of each
    head, of the sizes that the task gives. With a single tensor the graph of every loss would
    contain all heads.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        heads: tuple[int, ...],
        trunk: Trunk = "mlp",
        width: int = 64,
        hidden: Sequence[int] = (64,),
        channels: Sequence[int] = (16, 32),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        options = MultiHeadOptions(
            input_shape, num_outputs, heads, trunk, width, hidden, channels, activation
        )
        width = options.width
        match options.trunk:
            case "mlp":
                self.trunk = MLP(options.input_shape, width, hidden=options.hidden)
            case "convnet":
                self.trunk = Convnet(options.input_shape, width, channels=options.channels)
        self._activation = options.activation
        match options.activation:
            case "relu":
                self.relu = nn.ReLU()
            case "tanh":
                self.tanh = nn.Tanh()
            case "sigmoid":
                self.sigmoid = nn.Sigmoid()
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in options.heads)

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        features = self.get_submodule(self._activation)(self.trunk(inputs))
        return tuple(head(features) for head in self.heads)
