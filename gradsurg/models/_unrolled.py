"""A recurrent layer in as many calls of its cell as there are steps."""

from typing import Literal

import torch
from torch import Tensor, nn

Cell = Literal["rnn", "gru", "lstm"]
CELLS = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
State = Tensor | tuple[Tensor, Tensor]


class Unrolled(nn.Module):
    """The function of torch's own layer, for inputs (batch, time, features)."""

    def __init__(self, cell: Cell, num_features: int, width: int) -> None:
        super().__init__()
        self.cell = CELLS[cell](num_features, width)

    def forward(self, inputs: Tensor) -> tuple[Tensor, State | None]:
        state, states = None, []
        for step in inputs.unbind(dim=1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, dim=1), state
