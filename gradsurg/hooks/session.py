"""The state that all hooks of one attached surgery share."""

import sys
import warnings
from dataclasses import dataclass, field

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.transforms.base import TransformState
from gradsurg.triggers.base import Clock


@dataclass(slots=True)
class Session:
    """The state that all hooks of one attached surgery share; made by `Surgery.attach`.

    `target` is the model; None for a hook without a model, and after `close`.
    """

    effects: Effects
    clock: Clock = field(default_factory=Clock)
    states: dict[str, TransformState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    seed: int = 0
    shadow: bool = False
    target: nn.Module | None = None
    optimizer: Optimizer | None = None
    scaler: GradScaler | None = None
    warned: set[str] = field(default_factory=set)

    @property
    def model(self) -> nn.Module:
        """The model. Raises RuntimeError if the surgery is detached."""
        if self.target is None:
            raise RuntimeError("the block has ended, and with it the surgery: attach it again")
        return self.target

    def check_attached(self) -> None:
        """Raise RuntimeError if the surgery is detached."""
        _ = self.model

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled GradScaler scales the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """The factor of the GradScaler; 1 without one."""
        return self.scaler.get_scale() if self.scaler is not None and self.is_scaled else 1.0

    def warn_once(self, text: str, key: str = "") -> None:
        """Warn the caller outside gradsurg; texts with the same `key` are emitted once."""
        if (key or text) not in self.warned:
            self.warned.add(key or text)
            warnings.warn(text, SurgeryWarning, stacklevel=_user_stacklevel())

    def close(self) -> None:
        """Release the model, the optimizer and all gradients still held for measuring."""
        self.target = self.optimizer = self.scaler = None
        self.clock.observations.clear()
        self.clock.error = None
        self.ledger.settle()
        self.effects.close()


def _user_stacklevel() -> int:
    """The stack level, from the caller, of the first frame outside gradsurg."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gradsurg."):
        frame, level = frame.f_back, level + 1
    return level
