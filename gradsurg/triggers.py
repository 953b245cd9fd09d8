"""When a transform acts: conditions as data."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import Field

from gradsurg.fields import Contradiction, validated


class Trigger(ABC):
    """A condition on the optimizer step, decided on the host before any tensor is touched."""

    @abstractmethod
    def fires(self, step: int) -> bool:
        """Whether the transform acts while `step` optimizer steps have been done (from 0)."""


@validated
class Always(Trigger):
    """Every step."""

    def fires(self, step: int) -> bool:
        return True


@validated
class Steps(Trigger):
    """The steps from `start` up to, not including, `stop` (None: no end), `every` so many."""

    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] = 1

    def __post_init__(self) -> None:
        if self.stop is not None and self.stop <= self.start:
            raise Contradiction("stop", f"must be > start ({self.start}), found {self.stop}")

    def fires(self, step: int) -> bool:
        inside = step >= self.start and (self.stop is None or step < self.stop)
        return inside and (step - self.start) % self.every == 0
