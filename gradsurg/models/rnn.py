"""RNN: recurrent layers, plain, GRU or LSTM, over a sequence, then a linear readout."""

from typing import Annotated, Literal

import torch
from einops.layers.torch import Rearrange
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import Contradiction, validated

Size = Annotated[int, Field(gt=0)]
Cell = Literal["rnn", "gru", "lstm"]
Init = Literal["torch", "basic_tanh", "smart_tanh"]
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
State = Tensor | tuple[Tensor, Tensor]
NUM_REACHED, RADIUS = 15, 0.95


@validated
class RNNOptions:
    """The checked arguments of `RNN`."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    num_tokens: Size | None = None
    every_step: bool = False
    cell: Cell = "rnn"
    width: Size = 64
    num_layers: Size = 1
    unrolled: bool = False
    one_hot: bool = False
    init: Init = "torch"

    def __post_init__(self) -> None:
        if self.one_hot and self.num_tokens is None:
            raise Contradiction("one_hot", "needs tokens, and the inputs are numbers")
        if self.init != "torch" and self.cell != "rnn":
            raise Contradiction("init", f"must be torch with cell={self.cell}, found {self.init}")
        most, rule = (3, "have 1 to 3 axes") if self.num_tokens is None else (1, "be (time,)")
        if not 1 <= len(self.input_shape) <= most:
            raise Contradiction("input_shape", f"must {rule}, found {self.input_shape}")


class RNN(nn.Module):
    """Recurrent layers, and a readout of the last state, or with `every_step` of every state.

    Takes tokens (time,), which are embedded or become rows of the identity (`one_hot`), numbers
    (time,) or (time, features), or an image (C, H, W), row by row. Its modules are `embed`,
    `layers.0`, ..., `output`. A layer is one call, or with `unrolled` a call of `layers.0.cell` for
    each step, which gives the same results more slowly, but hooks see every step.

    `init` is torch's own or one of Pascanu et al. 2013 (arXiv 1211.5063, their code), with biases
    of zero. `basic_tanh` has normal weights of deviation 0.1, `smart_tanh` of 0.01. The latter has
    recurrent weights from each unit to 15 random units only, scaled to a spectral radius of 0.95.
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
        one_hot: bool = False,
        init: Init = "torch",
    ) -> None:
        super().__init__()
        options = RNNOptions(
            input_shape,
            num_outputs,
            num_tokens,
            every_step,
            cell,
            width,
            num_layers,
            unrolled,
            one_hot,
            init,
        )
        self.embed, num_features = _embed(options)
        sizes = [num_features] + [options.width] * (options.num_layers - 1)
        self.layers = nn.ModuleList(_layer(options, size) for size in sizes)
        self.output = nn.Linear(options.width, options.num_outputs)
        self.every_step = options.every_step
        _start(self, options.init)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.embed(inputs)
        for layer in self.layers:
            states, _ = layer(states)
        return self.output(states if self.every_step else states[:, -1])


class OneHot(nn.Module):
    """One-hot encoding of tokens, without parameters."""

    rows: Tensor

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.eye(num_tokens), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens]


class Unrolled(nn.Module):
    """A recurrent layer that calls its cell once a step; inputs are (batch, time, features)."""

    def __init__(self, cell: Cell, num_features: int, width: int) -> None:
        super().__init__()
        self.cell = CELLS[cell](num_features, width)

    def forward(self, inputs: Tensor) -> tuple[Tensor, State | None]:
        state, states = None, []
        for step in inputs.unbind(dim=1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, dim=1), state


def _embed(options: RNNOptions) -> tuple[nn.Module, int]:
    """Return a module from inputs to (batch, time, features), and the number of features."""
    if options.num_tokens is not None:
        if options.one_hot:
            return OneHot(options.num_tokens), options.num_tokens
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


@torch.no_grad()
def _start(model: RNN, init: Init) -> None:
    """Initialize all weights except those of an embedding."""
    if init == "torch":
        return
    for name, parameter in [*model.layers.named_parameters(), *model.output.named_parameters()]:
        if "bias" in name:
            parameter.zero_()
            continue
        parameter.normal_(std=0.1 if init == "basic_tanh" else 0.01)
        if init == "smart_tanh" and "weight_hh" in name:
            # A column has the outgoing weights of a unit.
            for column in parameter.unbind(dim=1):
                column[torch.randperm(len(column))[NUM_REACHED:]] = 0
            parameter *= RADIUS / torch.linalg.eigvals(parameter).abs().max()
