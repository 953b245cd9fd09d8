"""Checkpoints: the whole state of a training, and when to save it."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.run import Schedule
from gradsurg.experiment.run_identity import environment
from gradsurg.torch_internals.random_state import get_states, set_states

Checkpoint = dict[str, Any]
"""The state that a run resumes from. Any: each key has its own type.

`model`, `optimizer`, `lr_schedule`, `scaler` and `surgery` are state dicts; `lr_schedule` and
`scaler` may be None. `ledger` and `effects` are states of the attached surgery, `generators` the
states of the random generators. `step` counts the steps done, `skipped` the steps that the gradient
scaler skipped, `seconds` is the time of all steps. `warnings` are the surgery's so far, `made_with`
is the environment that computed the state. `ranks` has the states of the other processes, except
for the parts that are equal in all processes.
"""


class CheckpointTimer:
    """Decides when a checkpoint is due. Saving takes as long as many steps, so there is a
    minimum number of seconds between two.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._saved_at = monotonic()

    def due(self, done: int) -> bool:
        """Whether to save at the log after step `done`."""
        schedule, now = self._schedule, monotonic()
        early = done < schedule.steps and now - self._saved_at < schedule.checkpoint_seconds
        # A checkpoint is due at the first log since a multiple of `checkpoint_every`.
        if early or done % schedule.checkpoint_every >= schedule.log_every:
            return False
        self._saved_at = now
        return True


@dataclass(frozen=True)
class TrainingState:
    """The objects that training changes; all of their state is in a checkpoint."""

    model: nn.Module
    optimizer: Optimizer
    surgery: Surgery
    device: torch.device
    lr_schedule: LRScheduler | None
    scaler: GradScaler | None

    def checkpoint(
        self, done: int, live: Live, warned: list[str], skipped: int, seconds: float
    ) -> Checkpoint:
        """Return a checkpoint after step `done`."""
        return {
            "step": done,
            **{name: None if owner is None else owner.state_dict() for name, owner in self._owners},
            "surgery": self.surgery.state_dict(),
            "ledger": live.ledger.state(),
            "effects": live.effects.state(),
            "warnings": warned,
            "skipped": skipped,
            "seconds": seconds,
            "generators": get_states(self.device),
            "made_with": environment(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into all objects and into the global random generators."""
        for name, owner in self._owners:
            if owner is not None and checkpoint[name] is not None:
                owner.load_state_dict(checkpoint[name])
        # A checkpoint is read to the CPU; the other objects move their tensors themselves.
        states = {
            site: {name: tensor.to(self.device) for name, tensor in state.items()}
            for site, state in checkpoint["surgery"]["states"].items()
        }
        self.surgery.load_state_dict(checkpoint["surgery"] | {"states": states})
        set_states(checkpoint["generators"], self.device)

    @property
    def _owners(self) -> list[tuple[str, Any]]:  # Any: of four classes without a common one
        names = ("model", "optimizer", "lr_schedule", "scaler")
        return [(name, getattr(self, name)) for name in names]
