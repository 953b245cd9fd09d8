"""Three quadratics of different scales, and the base class of tasks that move a point."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiTask, by_name, floats

Place = tuple[float, float]
Scale = Annotated[float, Field(gt=0)]

CENTRES: tuple[Place, ...] = ((-4.0, -3.0), (4.0, -3.0), (0.0, 4.0))
STRETCHES: tuple[Place, ...] = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0))
STEPS = 24

NUM_EXAMPLES = 64  # all equal, so that the default batch size can be drawn
GRID = 101  # points of the landscape along each coordinate
DIGITS = 5


class Toy(MultiTask):
    """Losses of a point in the plane that starts at `place`, for pictures of its trajectory.

    Inputs and targets are ones and unused; outputs are points, one for each example, and a loss is
    the mean over them. The metrics are the losses and the point, `x1` and `x2`.
    """

    @property
    @abstractmethod
    def place(self) -> Place:
        """The starting point."""

    @property
    @abstractmethod
    def window(self) -> tuple[Place, Place]:
        """The range of each coordinate that is drawn."""

    @abstractmethod
    def values(self, points: Tensor) -> Sequence[Tensor]:
        """Return each loss at each of the points (number, 2)."""

    @abstractmethod
    def pareto(self) -> tuple[list[Place], bool]:
        """Return points of the Pareto set in order, and whether they are a closed curve."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(1 + number) for number in range(len(self.values(torch.zeros(1, 2)))))

    def load(self) -> Data:
        return starting_at(self.place)

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = self.values(outputs)
        return {name: value.mean() for name, value in zip(self.names, values, strict=True)}

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        x1, x2 = outputs.mean(dim=0).tolist()
        return {"loss": sum(losses), **by_name("loss", self.names, losses), "x1": x1, "x2": x2}

    def landscape(self) -> dict[str, Any]:  # Any: what JSON can hold
        def named(points: Tensor) -> dict[str, Tensor]:
            return dict(zip(self.names, self.values(points), strict=True))

        return tabulate(self.place, self.window, named, *self.pareto())


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
        """Return the minimum of sum w_i loss_i for each row of three weights."""
        squares = torch.tensor(STRETCHES, dtype=weights.dtype).square()
        parts = (weights * weights.new_tensor(self.scales))[:, :, None] * squares
        return (parts * weights.new_tensor(CENTRES)).sum(dim=1) / parts.sum(dim=1)

    def pareto(self) -> tuple[list[Place], bool]:
        corners = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]]
        # Without the scales in the weights all points of a side would be at one of its ends.
        corners = corners / torch.tensor(self.scales, dtype=torch.float64)
        along = torch.arange(STEPS, dtype=torch.float64)[:, None] / STEPS
        sides = [(1 - along) * here + along * there for here, there in pairwise(corners)]
        points = self.stationary(torch.cat(sides)).tolist()
        return [(x1, x2) for x1, x2 in points], True


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


def tabulate(
    place: Place,
    window: tuple[Place, Place],
    values: Callable[[Tensor], Mapping[str, Tensor]],
    pareto: Sequence[Place],
    closed: bool,
) -> dict[str, Any]:  # Any: what JSON can hold
    """Return `Task.landscape` of losses, given by a function from points (number, 2) to values."""
    x1, x2 = (torch.linspace(*ends, GRID, dtype=torch.float64) for ends in window)
    tables = values(torch.cartesian_prod(x2, x1).flip(1))
    return {
        "names": list(tables),
        "start": list(place),
        "x1": _rounded(x1),
        "x2": _rounded(x2),
        "values": {
            name: [_rounded(row) for row in value.view(GRID, GRID)]
            for name, value in tables.items()
        },
        "pareto": [_rounded(torch.tensor(point)) for point in pareto],
        "closed": closed,
    }


def _rounded(numbers: Tensor) -> list[float]:
    """Round to the digits that a picture shows."""
    return [float(f"{number:.{DIGITS}g}") for number in numbers.tolist()]
