"""Shape: fire by the size of a tensor."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.triggers.base import Source, TensorTrigger, TriggerContext


@validated
class Shape(TensorTrigger):
    """Fire when above < size < below, with the size of dimension `dim` of the source.

    By default this is the number of examples in the batch. At least one bound is required. Raises
    ValueError at a tensor without dimension `dim`.
    """

    above: Annotated[int, Field(ge=0)] | None = None
    below: Annotated[int, Field(ge=1)] | None = None
    dim: int = 0
    source: Source = "batch"

    homogeneous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise Contradiction("above", "or below is required")
        if self.above is not None and self.below is not None and self.below <= self.above + 1:
            raise Contradiction(
                "below", f"must be > above + 1 ({self.above + 1}), found {self.below}"
            )

    def observe(self, tensor: Tensor) -> object:
        return tuple(tensor.shape)

    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        assert isinstance(observation, tuple)
        if not -len(observation) <= self.dim < len(observation):
            text = f"the source has shape {list(observation)} and no dimension {self.dim}"
            raise FieldError(self, [("dim", text)])
        size = observation[self.dim]
        return (self.above is None or size > self.above) and (
            self.below is None or size < self.below
        )
