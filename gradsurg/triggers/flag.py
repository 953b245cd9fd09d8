"""Flag: an external switch."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Fires, Moment, Trigger


@validated
class Flag(Trigger):
    """While the switch called `flag` is on; `on` is how it stands at first.

    `live.switch("flag", on=True)` flips it at any time, from a callback or another thread too; it
    is asked at every gradient. Its position is kept in the surgery's state.
    """

    flag: Annotated[str, Field(min_length=1)] = "flag"
    on: bool = False

    def fires(self, moment: Moment) -> Fires:
        return None if moment.site is None else moment.clock.flags.get(self.flag, self.on)
