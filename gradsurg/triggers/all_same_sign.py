"""AllSameSign: when a tensor agrees with itself."""

from typing import ClassVar

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Source, TensorTrigger, TriggerContext


@validated
class AllSameSign(TensorTrigger):
    """When all entries of the source are positive, or all are negative; the device decides.

    A zero or a NaN among them, or no entry at all, does not fire.
    """

    source: Source = "grad"

    on_device: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True

    def observe(self, tensor: Tensor) -> object:
        same = (tensor > 0).all() | (tensor < 0).all()
        return same if tensor.numel() else ~same

    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        assert isinstance(observation, Tensor)
        return observation
