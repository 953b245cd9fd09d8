"""Flag: fire while a switch is on."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Flag(Trigger):
    """Fire while the switch named `flag` is on; `on` is its initial position.

    `live.switch("flag", on=True)` sets it at any time, also from a callback or another thread. It
    is read at every gradient. Its position is part of the surgery's state_dict. At gradients that
    DistributedDataParallel has averaged, the switch of process 0 counts.
    """

    flag: Annotated[str, Field(min_length=1)] = "flag"
    on: bool = False

    def fires(self, context: TriggerContext) -> Decision:
        return None if context.site is None else context.clock.flags.get(self.flag, self.on)
