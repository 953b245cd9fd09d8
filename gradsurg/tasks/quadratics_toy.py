"""Move a point under three quadratics of different scales; and the base class of such tasks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiTask, by_name, floats

Place = tuple[float, float]
Scale = Annotated[float, Field(gt=0)]

CENTRES: tuple[Place, ...] = ((-4.0, -3.0), (4.0, -3.0), (0.0, 4.0))
STRETCHES: tuple[Place, ...] = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0))
NUM_EXAMPLES = 64  # all equal, so that the default batch size can be drawn


class Toy(MultiTask):
    """Losses of a point in the plane that starts at `start`, for pictures of its trajectory.

    Inputs and targets are ones and unused; outputs are points, one for each example, and a loss is
    the mean over them. The metrics are the losses and the point, `x1` and `x2`.
    """

    start: Place

    @abstractmethod
    def values(self, points: Tensor) -> Sequence[Tensor]:
        """Return each loss at each of the points (number, 2)."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(1 + number) for number in range(len(self.values(torch.zeros(1, 2)))))

    def load(self) -> Data:
        return starting_at(self.start)

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = self.values(outputs)
        return {name: value.mean() for name, value in zip(self.names, values, strict=True)}

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        x1, x2 = outputs.mean(dim=0).tolist()
        return {"loss": sum(losses), **by_name("loss", self.names, losses), "x1": x1, "x2": x2}


@validated
class QuadraticsToy(Toy):
    """Move a point under three quadratics, loss_i = |A_i (x - c_i)|^2 for the centres c_i of a
    triangle.

    The c_i are (-4, -3), (4, -3) and (0, 4). A_i is sqrt(scale_i) times the diagonal matrix of
    (1, 2), (2, 1) and (1, 1).

    The Pareto set has all points (sum w_i A_i^2)^-1 sum w_i A_i^2 c_i with weights w of the
    simplex: a triangle with bent sides, the same whatever the scales. The mean of the losses is
    least where all weights are equal, which with scales far apart is close to the centre of the
    largest.
    """

    scales: tuple[Scale, Scale, Scale] = (1.0, 10.0, 100.0)
    start: Place = (6.0, 6.0)

    def values(self, points: Tensor) -> list[Tensor]:
        centres, stretches = points.new_tensor(CENTRES), points.new_tensor(STRETCHES)
        away = stretches * (points[:, None] - centres)
        return list((points.new_tensor(self.scales) * away.square().sum(dim=2)).unbind(dim=1))


def starting_at(place: Place) -> Data:
    """Return the constant examples of a task that moves a point."""
    return Data(
        train_inputs=torch.ones(NUM_EXAMPLES, 1),
        train_targets=torch.ones(NUM_EXAMPLES, 2),
        test_inputs=torch.ones(NUM_EXAMPLES, 1),
        test_targets=torch.ones(NUM_EXAMPLES, 2),
        input_shape=(1,),
        num_outputs=2,
        start=place,
    )
