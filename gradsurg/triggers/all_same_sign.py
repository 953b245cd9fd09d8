"""AllSameSign: fire when all entries of a tensor have the same sign."""

from typing import ClassVar

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Source, TensorTrigger, TriggerContext


@validated
class AllSameSign(TensorTrigger):
    """Fire when all entries of the source are > 0, or all are < 0.

    Evaluated on the device. Does not fire if an entry is zero or NaN, or if the tensor is empty.
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
