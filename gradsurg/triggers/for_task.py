"""ForTask: fire at the gradients of one task."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class ForTask(Trigger):
    """Fire while `live.backward(losses)` backpropagates the loss named `task`.

    The losses of a list are named "0", "1", ... At a site shared by several tasks the transform
    acts on the gradient of this task, before the tasks' gradients are aggregated. Does not fire in
    a backward pass outside `live.backward(losses)`.
    """

    task: Annotated[str, Field(min_length=1)]

    def fires(self, context: TriggerContext) -> Decision:
        return context.clock.task == self.task
