"""Always: no condition."""

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Fires, Moment, Trigger


@validated
class Always(Trigger):
    """Every gradient of every step."""

    def fires(self, moment: Moment) -> Fires:
        return True
