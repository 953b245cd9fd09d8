"""Index: fire at a range of layers of a container."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext, module_of


@validated
class Index(Trigger):
    """Fire at sites whose module has an index in range(start, stop); `stop=None` is no end.

    The index is the last number in the module's name: 3 in `encoder.layers.3.linear1`. Does not
    fire at a module whose name has no number. A module that its container holds twice has the
    first index in its first call and the second one in its second.
    """

    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.stop is not None and self.stop <= self.start:
            raise Contradiction("stop", f"must be > start ({self.start}), found {self.stop}")

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None:
            return None
        numbers = [int(part) for part in module_of(context.site).split(".") if part.isdecimal()]
        if not numbers:
            return False
        return numbers[-1] >= self.start and (self.stop is None or numbers[-1] < self.stop)
