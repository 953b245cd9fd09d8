"""ForTask: while the gradient of one task is flowing."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class ForTask(Trigger):
    """While `live.backward(losses)` sends back the gradient of the loss called `task`.

    Losses in an order are called 0, 1 and so on. What several tasks share meets one gradient a
    task then, before they are made one. In a backward that is of no task it does not fire.
    """

    task: Annotated[str, Field(min_length=1)]

    def fires(self, context: TriggerContext) -> Decision:
        return context.clock.task == self.task
