"""Probability: by chance."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.triggers.base import Fires, Moment, Trigger


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

    clocked: ClassVar[bool] = True

    def fires(self, moment: Moment) -> Fires:
        if self.p == 0:
            return False
        match self.per:
            case "step":
                return moment.chance(self.seed) < self.p
            case "site":
                return (
                    None if moment.site is None else moment.chance(self.seed, moment.site) < self.p
                )
