"""Flag: an external switch."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Flag(Trigger):
    """While the switch called `flag` is on; `on` is how it stands at first.

    `live.switch("flag", on=True)` flips it at any time, from a callback or another thread too; it
    is asked at every gradient. Its position is kept in the surgery's state.
    """

    flag: Annotated[str, Field(min_length=1)] = "flag"
    on: bool = False

    def fires(self, context: TriggerContext) -> Decision:
        return None if context.site is None else context.clock.flags.get(self.flag, self.on)
