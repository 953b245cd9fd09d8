"""RNN: recurrent layers, plain, GRU or LSTM, over a sequence, then a linear readout."""

from typing import Annotated

from einops.layers.torch import Rearrange
from pydantic import Field
from torch import Tensor, nn

from gradsurg.fields import Contradiction, validated
from gradsurg.models._unrolled import Cell, Unrolled

Size = Annotated[int, Field(gt=0)]
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@validated
class RNNOptions:
    """What an `RNN` is made of."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    num_tokens: Size | None = None
    every_step: bool = False
    cell: Cell = "rnn"
    width: Size = 64
    num_layers: Size = 1
    unrolled: bool = False

    def __post_init__(self) -> None:
        most, rule = (3, "have 1 to 3 axes") if self.num_tokens is None else (1, "be (time,)")
        if not 1 <= len(self.input_shape) <= most:
            raise Contradiction("input_shape", f"must {rule}, found {self.input_shape}")


class RNN(nn.Module):
    """Recurrent layers, and a readout of the last state, or with `every_step` of every state.

    Takes tokens (time,), which are embedded, numbers (time,) or (time, features), or an image
    (C, H, W), row by row. Its modules are `embed`, `layers.0`, ..., `output`. A layer is one call,
    or `unrolled` one of `layers.0.cell` for each step: the same, slower, and hooks see every step.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        num_tokens: int | None = None,
        every_step: bool = False,
        cell: Cell = "rnn",
        width: int = 64,
        num_layers: int = 1,
        unrolled: bool = False,
    ) -> None:
        super().__init__()
        options = RNNOptions(
            input_shape, num_outputs, num_tokens, every_step, cell, width, num_layers, unrolled
        )
        self.embed, num_features = _embed(options)
        sizes = [num_features] + [options.width] * (options.num_layers - 1)
        self.layers = nn.ModuleList(_layer(options, size) for size in sizes)
        self.output = nn.Linear(options.width, options.num_outputs)
        self.every_step = options.every_step

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.embed(inputs)
        for layer in self.layers:
            states, _ = layer(states)
        return self.output(states if self.every_step else states[:, -1])


def _embed(options: RNNOptions) -> tuple[nn.Module, int]:
    """What makes (batch, time, features) of the inputs, and the number of features."""
    if options.num_tokens is not None:
        return nn.Embedding(options.num_tokens, options.width), options.width
    match options.input_shape:
        case (_,):
            return Rearrange("batch time -> batch time 1"), 1
        case (_, features):
            return nn.Identity(), features
        case _:
            channels, _, across = options.input_shape
            return Rearrange("batch channel row x -> batch row (channel x)"), channels * across


def _layer(options: RNNOptions, size: int) -> nn.Module:
    if options.unrolled:
        return Unrolled(options.cell, size, options.width)
    return LAYERS[options.cell](size, options.width, batch_first=True)
