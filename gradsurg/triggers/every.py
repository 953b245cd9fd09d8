"""Every: fire at one optimizer step in `count`."""

from typing import Annotated, ClassVar

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Every(Trigger):
    """Fire at the optimizer steps offset, offset + count, offset + 2 * count, ..."""

    count: Annotated[int, Field(ge=1)]
    offset: Annotated[int, Field(ge=0)] = 0

    step_based: ClassVar[bool] = True

    def fires(self, context: TriggerContext) -> Decision:
        return context.step >= self.offset and (context.step - self.offset) % self.count == 0
