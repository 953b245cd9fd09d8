"""Shape: by the size of a tensor."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Moment, Source, Sourced


@validated
class Shape(Sourced):
    """When dimension `dim` of the source is larger than `above` and smaller than `below`.

    By default the source is the batch, and its dimension 0 the number of examples. Raises
    ValueError at a tensor that has no such dimension.
    """

    above: Annotated[int, Field(ge=0)] | None = None
    below: Annotated[int, Field(ge=1)] | None = None
    dim: int = 0
    source: Source = "batch"

    homogeneous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise Contradiction("above", "is required, or below")
        if self.above is not None and self.below is not None and self.below <= self.above + 1:
            raise Contradiction(
                "below", f"must be > above + 1 ({self.above + 1}), found {self.below}"
            )

    def look(self, tensor: Tensor) -> object:
        return tuple(tensor.shape)

    def judge(self, look: object, moment: Moment) -> bool | Tensor:
        assert isinstance(look, tuple)
        if not -len(look) <= self.dim < len(look):
            raise Contradiction(
                "dim",
                f"{self!r}: the source has the shape {list(look)}, so dim {self.dim} is not there",
            )
        size = look[self.dim]
        return (self.above is None or size > self.above) and (
            self.below is None or size < self.below
        )
