"""Depth: fire at modules of some nesting depths."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext, module_of


@validated
class Depth(Trigger):
    """Fire at sites whose module is nested `low` to `high` levels deep, both included.

    The depth is the number of parts of the module's name: 0 for the model itself, 1 for its
    children. A parameter has the depth of its module. `high=None` is no upper bound.
    """

    low: Annotated[int, Field(ge=0)] = 0
    high: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.high < self.low:
            raise Contradiction("high", f"must be >= low ({self.low}), found {self.high}")

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None:
            return None
        module = module_of(context.site)
        depth = 0 if module in ("", "root") else module.count(".") + 1
        return depth >= self.low and (self.high is None or depth <= self.high)
