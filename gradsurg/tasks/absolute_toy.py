"""A sum of two absolute values: where steps by the sign of the gradient never get nearer."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.fields import validated
from gradsurg.tasks._toys import Place, Toy


@validated
class AbsoluteToy(Toy):
    """f = epsilon |x1 + x2| + |x1 - x2|, least at (0, 0).

    Counter-example 2 of Karimireddy et al., ICML 2019 (arXiv 1901.09847), whose start is (1, 1) and
    whose epsilon is below 1: the two entries of every subgradient have opposite signs, so a step by
    signs leaves x1 + x2 what it is. At a tie the slope of |z| is taken to be +1, where torch would
    have 0, and with it the sign of the gradient.
    """

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.5
    start: tuple[float, float] = (1.0, 1.0)

    @property
    def place(self) -> Place:
        return self.start

    @property
    def window(self) -> tuple[Place, Place]:
        return (-1.5, 1.5), (-1.5, 1.5)

    def values(self, points: Tensor) -> tuple[Tensor]:
        x1, x2 = points.unbind(dim=1)
        return (self.epsilon * _magnitude(x1 + x2) + _magnitude(x1 - x2),)

    def pareto(self) -> tuple[list[Place], bool]:
        return [(0.0, 0.0)], False


def _magnitude(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, -z)
