"""AllSameSign: when a tensor agrees with itself."""

from typing import ClassVar

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Moment, Source, Sourced


@validated
class AllSameSign(Sourced):
    """When all entries of the source are positive, or all are negative; the device decides.

    A zero or a NaN among them, or no entry at all, does not fire.
    """

    source: Source = "grad"

    on_device: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True

    def look(self, tensor: Tensor) -> object:
        same = (tensor > 0).all() | (tensor < 0).all()
        return same if tensor.numel() else ~same

    def judge(self, look: object, moment: Moment) -> bool | Tensor:
        assert isinstance(look, Tensor)
        return look
