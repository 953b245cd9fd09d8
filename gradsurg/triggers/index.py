"""Index: by a module's place in its container."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext, module_of


@validated
class Index(Trigger):
    """At sites whose module is number `start` up to, not including, `stop` of its container.

    The number is the last one in the module's name: 3 in `encoder.layers.3.linear1`; a module whose
    name has none does not fire. A module that stands in its container twice has both numbers, one
    call after the other.
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
