"""Point: a model whose outputs are its parameter, a point."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import Contradiction, validated

Size = Annotated[int, Field(gt=0)]


@validated
class PointOptions:
    """The checked arguments of `Point`."""

    input_shape: tuple[int, ...]
    num_outputs: Size
    start: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.start) != self.num_outputs:
            rule = f"must have {self.num_outputs} coordinates, found {len(self.start)}"
            raise Contradiction("start", rule)


class Point(nn.Module):
    """A few coordinates that start at `start` and are returned for every input.

    Its only parameter is `point`. Used by toy tasks, to study its trajectory.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, *, start: tuple[float, ...]
    ) -> None:
        super().__init__()
        options = PointOptions(input_shape, num_outputs, start)
        self.point = nn.Parameter(torch.tensor(options.start))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.point.expand(len(inputs), -1)
