"""The state that all hooks of one attached surgery share."""

import sys
import warnings
from dataclasses import dataclass, field

import torch
from torch import nn

from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.transforms.base import TransformState
from gradsurg.triggers.base import Clock

DETACHED = "the block has ended, and with it the surgery: attach it again"


@dataclass(slots=True, eq=False)
class Session:
    """The state that all hooks of one attached surgery share; hooks hold it, and not the handle.

    `target` is the model; None for a hook without a model, and after `close`. `rank` is the number
    of this process among the `processes` of the default process group. `shadow` measures effects
    and applies nothing.
    """

    effects: Effects
    clock: Clock = field(default_factory=Clock)
    states: dict[str, TransformState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    seed: int = 0
    rank: int = 0
    processes: int = 1
    conflict_every: int = 1
    shadow: bool = False
    target: nn.Module | None = None
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    scaler: torch.amp.GradScaler | None = None
    factor: float = 1.0  # of the losses of `live.backward`
    warned: set[str] = field(default_factory=set)

    @property
    def model(self) -> nn.Module:
        """The model. Raises RuntimeError if the surgery is detached."""
        if self.target is None:
            raise RuntimeError(DETACHED)
        return self.target

    def check_attached(self) -> None:
        """Raise RuntimeError if the surgery is detached."""
        if self.target is None:
            raise RuntimeError(DETACHED)

    @property
    def measures_conflicts(self) -> bool:
        """Whether the conflict of several tasks is measured in this step."""
        return self.effects.sampling and self.clock.step % self.conflict_every == 0

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled GradScaler scales the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """What the losses were multiplied by: the factor of the GradScaler and of `backward`."""
        return self.factor * (self.scaler.get_scale() if self.scaler and self.is_scaled else 1.0)

    def warn_once(self, text: str, key: str = "") -> None:
        """Warn the caller outside gradsurg; texts with the same `key` are emitted once."""
        if (key or text) not in self.warned:
            self.warned.add(key or text)
            warn_user(text)

    def close(self) -> None:
        """Release the model, the optimizers and the counts on the device."""
        self.target = self.scaler = None
        self.steps.close()
        self.clock.observations.clear()
        self.clock.error, self.clock.batch = None, {}
        self.ledger.settle()


def warn_user(text: str) -> None:
    """Warn the first caller outside gradsurg."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gradsurg."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, SurgeryWarning, stacklevel=level)
