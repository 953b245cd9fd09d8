"""DiscretizedMLP: an MLP that rounds its inputs, with a straight-through backward."""

from collections.abc import Sequence
from typing import Annotated

from gradsurg.experiments.athalye2018.layers import Discretize
from pydantic import Field
from torch import Tensor, nn

from gradsurg.models.mlp import MLP
from gradsurg.plugins.fields import validated


@validated
class DiscretizedOptions:
    """The checked width of the steps of `DiscretizedMLP`."""

    step: Annotated[float, Field(ge=0)] = 0.5


class DiscretizedMLP(nn.Module):
    """`discretize`, then `network`, an MLP with the `hidden` widths."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
        step: float = 0.5,
    ) -> None:
        super().__init__()
        self.discretize = Discretize(DiscretizedOptions(step).step)
        self.network = MLP(input_shape, num_outputs, hidden=hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(self.discretize(inputs))
