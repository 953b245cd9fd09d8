"""Probability: by chance."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Probability(Trigger):
    """With probability `p`, drawn on the host from the surgery's seed, `seed` and the step alone.

    `per="step"` draws once a step for all sites together, `per="site"` once a step for each site.
    Two that differ in their `seed` are independent, two that do not fire together: an arm and its
    control see the same. The global random generators are not touched.
    """

    p: Annotated[float, Field(ge=0, le=1)]
    per: Literal["step", "site"] = "step"
    seed: Annotated[int, Field(ge=0)] = 0

    step_based: ClassVar[bool] = True

    def fires(self, context: TriggerContext) -> Decision:
        if self.p == 0:
            return False
        match self.per:
            case "step":
                return context.chance(self.seed) < self.p
            case "site":
                return (
                    None
                    if context.site is None
                    else context.chance(self.seed, context.site) < self.p
                )
