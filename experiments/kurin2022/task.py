"""Two overlaid digits with the loss of the second times a factor; tests show it without."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Outputs
from gradsurg.tasks.mnist_overlay import MNISTOverlay
from gradsurg.tasks.overlay import Overlay

Factor = Annotated[float, Field(gt=0)]


@validated
class ScaledOverlay(Overlay):
    """`Overlay`, trained with the second loss times `factor`; its metrics are without it."""

    factor: Factor = 1.0

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        return scaled(super().losses(outputs, targets), self.factor)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return super(ScaledOverlay, replace(self, factor=1.0)).metrics(outputs, targets)


@validated
class ScaledMNISTOverlay(MNISTOverlay):
    """`MNISTOverlay` in the same way."""

    factor: Factor = 1.0

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        return scaled(super().losses(outputs, targets), self.factor)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return super(ScaledMNISTOverlay, replace(self, factor=1.0)).metrics(outputs, targets)


def scaled(losses: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return the losses with the second times a factor."""
    first, second = losses
    return {first: losses[first], second: factor * losses[second]}
