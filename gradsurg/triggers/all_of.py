"""AllOf: several conditions at once."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from gradsurg.fields import validated
from gradsurg.triggers.base import Fires, Moment, Trigger


@validated
class AllOf(Trigger):
    """When all of the triggers `of` fire: `a & b`. Those behind one that says no are not asked."""

    of: Annotated[tuple[Trigger, ...], Field(min_length=1)]

    @property
    def parts(self) -> Iterator[Trigger]:
        for trigger in self.of:
            yield from trigger.parts

    def fires(self, moment: Moment) -> Fires:
        result: Fires = True
        for trigger in self.of:
            fires = trigger.fires(moment)
            if fires is False:
                return False
            if fires is None or result is None:
                result = None
            elif fires is not True:
                result = fires if result is True else result & fires
        return result
