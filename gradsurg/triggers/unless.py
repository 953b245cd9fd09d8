"""Unless: the opposite of a condition."""

from collections.abc import Iterator

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Unless(Trigger):
    """When the trigger `of` does not fire: `~a`."""

    of: Trigger

    @property
    def parts(self) -> Iterator[Trigger]:
        yield from self.of.parts

    def fires(self, context: TriggerContext) -> Decision:
        fires = self.of.fires(context)
        if fires is None:
            return None
        return ~fires if isinstance(fires, Tensor) else not fires
