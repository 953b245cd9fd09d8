"""AllOf: several conditions at once."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext, combined, host_first


@validated
class AllOf(Trigger):
    """When all of the triggers `of` fire: `a & b`.

    Those that the host decides are asked first, and behind one that says no none is asked: then the
    memory of a `Threshold(release=)` stands still.
    """

    of: Annotated[tuple[Trigger, ...], Field(min_length=1)]

    @property
    def parts(self) -> Iterator[Trigger]:
        for trigger in self.of:
            yield from trigger.parts

    @cached_property
    def _asked(self) -> list[Trigger]:
        return host_first(self.of)

    def fires(self, context: TriggerContext) -> Decision:
        return combined(self._asked, context, decides=False)
