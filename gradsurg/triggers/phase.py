"""Phase: fire in one phase of a run, such as warm-up, training or fine-tuning."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Phase(Trigger):
    """Fire in one phase of a run.

    `warm_up` is the number of steps of the first phase. `fine_tune` is the first step of the last
    phase; with None no such phase begins. The phase `train` lies between them.
    """

    phase: Literal["warm_up", "train", "fine_tune"]
    warm_up: Annotated[int, Field(ge=0)] = 0
    fine_tune: Annotated[int, Field(ge=1)] | None = None

    step_based: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.fine_tune is not None and self.fine_tune < self.warm_up:
            raise Contradiction(
                "fine_tune", f"must be >= warm_up ({self.warm_up}), found {self.fine_tune}"
            )
        if self.phase == "warm_up" and not self.warm_up:
            raise Contradiction("warm_up", "must be > 0 steps for this phase, found 0")
        if self.phase == "fine_tune" and self.fine_tune is None:
            raise Contradiction("fine_tune", "must be the step at which the phase begins")

    def fires(self, context: TriggerContext) -> Decision:
        if context.step < self.warm_up:
            return self.phase == "warm_up"
        if self.fine_tune is not None and context.step >= self.fine_tune:
            return self.phase == "fine_tune"
        return self.phase == "train"
