"""Epochs: fire in a range of epochs."""

from typing import Annotated

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


@validated
class Epochs(Trigger):
    """Fire in every `every`-th epoch of range(start, stop); `stop=None` is no end.

    An epoch has `length` optimizer steps. With `length=None` it has `attach(steps_per_epoch=)`
    steps, or ends at each `live.next_epoch()`.
    """

    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] = 1
    length: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.stop is not None and self.stop <= self.start:
            raise Contradiction("stop", f"must be > start ({self.start}), found {self.stop}")

    def fires(self, context: TriggerContext) -> Decision:
        epoch = context.step // self.length if self.length is not None else context.epoch
        inside = epoch >= self.start and (self.stop is None or epoch < self.stop)
        return inside and (epoch - self.start) % self.every == 0
