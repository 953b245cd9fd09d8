"""What the aggregators of an attachment have in common, and how they speak to the user."""

import sys
import warnings
from dataclasses import dataclass, field

from torch.amp import GradScaler

from gradsurg.aggregators.base import AggregatorState
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.multitask.conflict import Conflicts
from gradsurg.triggers.base import Clock


@dataclass
class AggregationContext:
    """What the aggregators of an attachment have in common."""

    effects: Effects
    clock: Clock
    states: dict[str, AggregatorState]
    ledger: Ledger
    seed: int
    scaler: GradScaler | None
    counts_steps: bool  # whether an optimizer tells of its steps
    conflicts: Conflicts = field(default_factory=Conflicts)
    said: set[str] = field(default_factory=set)

    @property
    def scale(self) -> float:
        """The loss scale that is on the losses, where a scaler was told."""
        return self.scaler.get_scale() if self.scaler is not None and self.scaled else 1.0

    @property
    def scaled(self) -> bool:
        """Whether a loss scale is on the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    def tell(self, text: str, of: str = "") -> None:
        """Say something once: two texts `of` one thing are one."""
        if (of or text) not in self.said:
            self.said.add(of or text)
            warnings.warn(text, SurgeryWarning, stacklevel=_users())


def _users() -> int:
    """How far up the stack, from who asks, the first frame is that is not of gradsurg."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gradsurg."):
        frame, level = frame.f_back, level + 1
    return level
