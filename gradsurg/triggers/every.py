"""Every: one step in so many."""

from typing import Annotated, ClassVar

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Fires, Moment, Trigger


@validated
class Every(Trigger):
    """One step in `count`, the first of them at step `offset`."""

    count: Annotated[int, Field(ge=1)]
    offset: Annotated[int, Field(ge=0)] = 0

    clocked: ClassVar[bool] = True

    def fires(self, moment: Moment) -> Fires:
        return moment.step >= self.offset and (moment.step - self.offset) % self.count == 0
