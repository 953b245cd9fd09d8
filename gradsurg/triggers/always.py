"""Always: fire at every gradient."""

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Always(Trigger):
    """Fire at every gradient of every step."""

    def fires(self, context: TriggerContext) -> Decision:
        return True
