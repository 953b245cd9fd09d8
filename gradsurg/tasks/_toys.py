"""Toys: several losses of a point in the plane, for pictures of where it goes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurg.tasks._several import numbers, of_each
from gradsurg.tasks.base import Data, MultiTask

Place = tuple[float, float]

NUM_EXAMPLES = 64  # all the same, so that the usual batch size can be had
GRID = 101  # lines of the landscape each way
DIGITS = 5


class Toy(MultiTask):
    """Losses of a point that starts at `start`: there is nothing to learn from, only to move.

    Inputs and targets are ones and mean nothing; outputs are points, one an example, whose losses
    are averaged. The metrics are the losses and where the point is, `x1` and `x2`.
    """

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where the point starts."""

    @property
    @abstractmethod
    def window(self) -> tuple[Place, Place]:
        """What of the plane is drawn: from where to where in each coordinate."""

    @abstractmethod
    def values(self, points: Tensor) -> Sequence[Tensor]:
        """Each loss at each of the points (number, 2)."""

    @abstractmethod
    def pareto(self) -> tuple[list[Place], bool]:
        """Points of the Pareto set in order, and whether they go around it."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(1 + number) for number in range(len(self.values(torch.zeros(1, 2)))))

    def load(self) -> Data:
        return starting_at(self.place)

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = self.values(outputs)
        return {name: value.mean() for name, value in zip(self.names, values, strict=True)}

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = numbers(self.losses(outputs, targets).values())
        x1, x2 = outputs.mean(dim=0).tolist()
        return {"loss": sum(losses), **of_each("loss", self.names, losses), "x1": x1, "x2": x2}

    def landscape(self) -> dict[str, Any]:  # Any: what JSON can hold
        def named(points: Tensor) -> dict[str, Tensor]:
            return dict(zip(self.names, self.values(points), strict=True))

        return landscape(self.place, self.window, named, *self.pareto())


def starting_at(place: Place) -> Data:
    """Examples that mean nothing, for a point that starts there."""
    return Data(
        train_inputs=torch.ones(NUM_EXAMPLES, 1),
        train_targets=torch.ones(NUM_EXAMPLES, 2),
        test_inputs=torch.ones(NUM_EXAMPLES, 1),
        test_targets=torch.ones(NUM_EXAMPLES, 2),
        input_shape=(1,),
        num_outputs=2,
        start=place,
    )


def landscape(
    place: Place,
    window: tuple[Place, Place],
    values: Callable[[Tensor], Mapping[str, Tensor]],
    pareto: Sequence[Place],
    closed: bool,
) -> dict[str, Any]:  # Any: what JSON can hold
    """What `Task.landscape` gives, of the losses at points (number, 2) by their names."""
    x1, x2 = (torch.linspace(*ends, GRID, dtype=torch.float64) for ends in window)
    tables = values(torch.cartesian_prod(x2, x1).flip(1))
    return {
        "names": list(tables),
        "start": list(place),
        "x1": _short(x1),
        "x2": _short(x2),
        "values": {
            name: [_short(row) for row in value.view(GRID, GRID)] for name, value in tables.items()
        },
        "pareto": [_short(torch.tensor(point)) for point in pareto],
        "closed": closed,
    }


def _short(numbers: Tensor) -> list[float]:
    """With as many digits as a picture shows."""
    return [float(f"{number:.{DIGITS}g}") for number in numbers.tolist()]
