"""What a run goes on from after an interruption."""

from dataclasses import dataclass
from time import monotonic
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.effects.effects import EffectsState
from gradsurg.effects.ledger import EntryState
from gradsurg.surgery.live import Live
from gradsurg.surgery.surgery import Surgery
from gradsurg.torch_internals.random_state import Generators, generators, put_back
from gradsurg.training.arms import Schedule
from gradsurg.training.run_identity import environment


class Checkpoint(TypedDict):
    """What a run goes on from."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]  # Any: torch says so
    lr_schedule: dict[str, Any] | None  # Any: as above
    scaler: dict[str, Any] | None  # Any: as above
    surgery: dict[str, object]
    ledger: list[EntryState]
    effects: EffectsState
    said: list[str]
    skipped: int
    seconds: float
    generators: Generators
    made_with: dict[str, str]


class Saving:
    """When a checkpoint is due: to save costs milliseconds, as much as many a step."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._saved = monotonic()

    def due(self, done: int) -> bool:
        """Whether to save at a log, after step `done`."""
        every = self._schedule
        if done % every.checkpoint_every >= every.log_every:
            return False
        now = monotonic()
        if done < every.steps and now - self._saved < every.checkpoint_seconds:
            return False
        self._saved = now
        return True


@dataclass(frozen=True)
class Trainee:
    """What training changes: all of it is in a checkpoint."""

    model: nn.Module
    optimizer: Optimizer
    surgery: Surgery
    device: torch.device
    lr_schedule: LRScheduler | None = None
    scaler: GradScaler | None = None

    def checkpoint(
        self, done: int, live: Live, said: list[str], skipped: int = 0, seconds: float = 0.0
    ) -> Checkpoint:
        """Everything that going on after step `done` needs."""
        return Checkpoint(
            step=done,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            lr_schedule=self.lr_schedule.state_dict() if self.lr_schedule else None,
            scaler=self.scaler.state_dict() if self.scaler else None,
            surgery=self.surgery.state_dict(),
            ledger=live.ledger.state(),
            effects=live.effects.state(),
            said=said,
            skipped=skipped,
            seconds=seconds,
            generators=generators(self.device),
            made_with=environment(),
        )

    def take_up(self, kept: Checkpoint) -> None:
        """Be, and have the generators be, where the checkpoint was."""
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        if self.lr_schedule is not None and kept["lr_schedule"] is not None:
            self.lr_schedule.load_state_dict(kept["lr_schedule"])
        if self.scaler is not None and kept["scaler"] is not None:
            self.scaler.load_state_dict(kept["scaler"])
        self.surgery.load_state_dict(_moved(kept["surgery"], self.device))
        put_back(kept["generators"], self.device)


def _moved(surgery: dict[str, object], device: torch.device) -> dict[str, object]:
    """A surgery's state with its tensors on `device`: a checkpoint is read on the CPU."""
    states = cast(dict[str, dict[str, Tensor]], surgery["states"])
    moved = {
        site: {name: tensor.to(device) for name, tensor in state.items()}
        for site, state in states.items()
    }
    return surgery | {"states": moved}
