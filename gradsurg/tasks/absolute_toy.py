"""A sum of two absolute values: where steps by the sign of the gradient never get nearer."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks._toys import landscape, starting_at
from gradsurg.tasks.base import Data, Task

REACH = 1.5  # of what is drawn


@validated
class AbsoluteToy(Task):
    """f = epsilon |x1 + x2| + |x1 - x2|, least at (0, 0).

    Counter-example 2 of Karimireddy et al., ICML 2019 (arXiv 1901.09847), whose start is (1, 1) and
    whose epsilon is below 1: the two entries of every subgradient have opposite signs, so a step by
    signs leaves x1 + x2 what it is. At a tie the slope of |z| is taken to be +1, where torch would
    have 0, and with it the sign of the gradient.
    """

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.5
    start: tuple[float, float] = (1.0, 1.0)

    def load(self) -> Data:
        return starting_at(self.start)

    def values(self, points: Tensor) -> Tensor:
        """f at each of the points (number, 2)."""
        x1, x2 = points.unbind(dim=1)
        return self.epsilon * _magnitude(x1 + x2) + _magnitude(x1 - x2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.values(outputs).mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        x1, x2 = outputs.mean(dim=0).tolist()
        return {"loss": self.loss(outputs, targets).item(), "x1": x1, "x2": x2}

    def landscape(self) -> dict[str, Any]:  # Any: what JSON can hold
        window = (-REACH, REACH), (-REACH, REACH)
        least = [(0.0, 0.0)]
        return landscape(
            self.start, window, lambda points: {"f": self.values(points)}, least, False
        )


def _magnitude(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, -z)
