"""Three quadratics whose scales differ: where the means of losses and of directions part."""

from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks._toys import Place, Toy

Scale = Annotated[float, Field(gt=0)]

CENTRES: tuple[Place, ...] = ((-4.0, -3.0), (4.0, -3.0), (0.0, 4.0))
STRETCHES: tuple[Place, ...] = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0))
STEPS = 24


@validated
class QuadraticsToy(Toy):
    """loss_i = |A_i (x - c_i)|^2 for three centres c_i of a triangle.

    c are (-4, -3), (4, -3) and (0, 4); A_i is the root of its scale times the diagonal matrix of
    (1, 2), (2, 1) and (1, 1). The Pareto set is that of all (sum w_i A_i^2)^-1 sum w_i A_i^2 c_i
    with weights w of the simplex: a triangle with bent sides, the same whatever the scales. The
    mean of the losses is least where all weights are equal, which with scales far apart is close
    to the centre of the largest.
    """

    scales: tuple[Scale, Scale, Scale] = (1.0, 10.0, 100.0)
    start: tuple[float, float] = (6.0, 6.0)

    @property
    def place(self) -> Place:
        return self.start

    @property
    def window(self) -> tuple[Place, Place]:
        return (-8, 8), (-8, 8)

    def values(self, points: Tensor) -> list[Tensor]:
        centres, stretches = points.new_tensor(CENTRES), points.new_tensor(STRETCHES)
        away = stretches * (points[:, None] - centres)
        return list((points.new_tensor(self.scales) * away.square().sum(dim=2)).unbind(dim=1))

    def stationary(self, weights: Tensor) -> Tensor:
        """Where sum w_i loss_i is least, for rows of three weights."""
        squares = torch.tensor(STRETCHES, dtype=weights.dtype).square()
        parts = (weights * weights.new_tensor(self.scales))[:, :, None] * squares
        return (parts * weights.new_tensor(CENTRES)).sum(dim=1) / parts.sum(dim=1)

    def pareto(self) -> tuple[list[Place], bool]:
        corners = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]]
        # the scales go into the weights, else all of a side's points were at one end
        corners = corners / torch.tensor(self.scales, dtype=torch.float64)
        along = torch.arange(STEPS, dtype=torch.float64)[:, None] / STEPS
        sides = [(1 - along) * here + along * there for here, there in pairwise(corners)]
        points = self.stationary(torch.cat(sides)).tolist()
        return [(x1, x2) for x1, x2 in points], True
