"""BoxedPoint: a point whose coordinates stay within bounds."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from gradsurg.models.point import PointOptions
from gradsurg.plugins.fields import validated


@validated
class Box:
    """The checked bound of `BoxedPoint`."""

    reach: Annotated[float, Field(gt=0)] = 1.0


class BoxedPoint(nn.Module):
    """A few coordinates in [-reach, reach] that are returned for every input.

    Its only parameter is `point`. Each forward projects it to the nearest point of the box:
    projected gradient descent.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        start: tuple[float, ...],
        reach: float = 1.0,
    ) -> None:
        super().__init__()
        options = PointOptions(input_shape, num_outputs, start)
        self.reach = Box(reach).reach
        self.point = nn.Parameter(torch.tensor(options.start))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.point.clamp_(-self.reach, self.reach)
        return self.point.expand(len(inputs), -1)
