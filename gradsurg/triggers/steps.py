"""Steps: fire in a range of optimizer steps."""

from typing import Annotated, ClassVar

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Steps(Trigger):
    """Fire at the optimizer steps range(start, stop, every); `stop=None` is no end."""

    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] = 1

    step_based: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stop is not None and self.stop <= self.start:
            raise Contradiction("stop", f"must be > start ({self.start}), found {self.stop}")

    def fires(self, context: TriggerContext) -> Decision:
        step = context.step
        inside = step >= self.start and (self.stop is None or step < self.stop)
        return inside and (step - self.start) % self.every == 0
