"""Probability: fire at random."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Probability(Trigger):
    """Fire with probability `p`, drawn on the host.

    `per="step"` draws one number a step for all sites, `per="site"` one a step for each site. The
    draw is a hash of the surgery's seed, the field `seed`, the step and, with `per="site"`, the
    site. So a treated arm and its control draw the same, and triggers with the same `seed` fire
    together. The global random generators are not used.
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
