"""Checkpoints: the whole state of a training, and when to save it."""

from dataclasses import dataclass
from time import monotonic
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.effects.effects import EffectsState
from gradsurg.effects.ledger import EntryState
from gradsurg.experiment.run import Schedule
from gradsurg.experiment.run_identity import environment
from gradsurg.torch_internals.random_state import GeneratorStates, get_states, set_states


class Checkpoint(TypedDict):
    """The state that a run resumes from, after `step` steps.

    `warnings` are the surgery's so far, `skipped` the steps that the gradient scaler skipped,
    `seconds` the time of all steps, `made_with` the environment that computed it. `ranks` has what
    the processes other than the first resume from, without what is the same in all.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]  # Any: torch's own type
    lr_schedule: dict[str, Any] | None  # Any: as above
    scaler: dict[str, Any] | None  # Any: as above
    surgery: dict[str, object]
    ledger: list[EntryState]
    effects: EffectsState
    warnings: list[str]
    skipped: int
    seconds: float
    generators: GeneratorStates
    made_with: dict[str, str]
    ranks: NotRequired[list[dict[str, Any]]]  # Any: the parts of this type that differ by process


class CheckpointTimer:
    """Decides when a checkpoint is due. Saving takes as long as many steps, so there is a
    minimum number of seconds between two.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._saved_at = monotonic()

    def due(self, done: int) -> bool:
        """Whether to save at the log after step `done`."""
        schedule = self._schedule
        if done % schedule.checkpoint_every >= schedule.log_every:
            return False
        now = monotonic()
        if done < schedule.steps and now - self._saved_at < schedule.checkpoint_seconds:
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
    lr_schedule: LRScheduler | None = None
    scaler: GradScaler | None = None

    def checkpoint(
        self, done: int, live: Live, warned: list[str], skipped: int = 0, seconds: float = 0.0
    ) -> Checkpoint:
        """Return a checkpoint after step `done`."""
        return Checkpoint(
            step=done,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            lr_schedule=self.lr_schedule.state_dict() if self.lr_schedule else None,
            scaler=self.scaler.state_dict() if self.scaler else None,
            surgery=self.surgery.state_dict(),
            ledger=live.ledger.state(),
            effects=live.effects.state(),
            warnings=warned,
            skipped=skipped,
            seconds=seconds,
            generators=get_states(self.device),
            made_with=environment(),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into all objects and into the global random generators."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.lr_schedule is not None and checkpoint["lr_schedule"] is not None:
            self.lr_schedule.load_state_dict(checkpoint["lr_schedule"])
        if self.scaler is not None and checkpoint["scaler"] is not None:
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.surgery.load_state_dict(_on_device(checkpoint["surgery"], self.device))
        set_states(checkpoint["generators"], self.device)


def _on_device(surgery: dict[str, object], device: torch.device) -> dict[str, object]:
    """Return a surgery's state with its tensors on `device`: a checkpoint is read to the CPU."""
    states = cast(dict[str, dict[str, Tensor]], surgery["states"])
    moved = {
        site: {name: tensor.to(device) for name, tensor in state.items()}
        for site, state in states.items()
    }
    return surgery | {"states": moved}
