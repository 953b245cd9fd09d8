"""What a run goes on from after an interruption."""

from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.effects import EffectsState
from gradsurg.ledger import EntryState
from gradsurg.live import Live
from gradsurg.surgery import Surgery


class Checkpoint(TypedDict):
    """What a run goes on from."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]  # Any: torch says so
    surgery: dict[str, object]
    ledger: list[EntryState]
    effects: EffectsState
    said: list[str]
    rng: Tensor
    device_rng: Tensor | None


@dataclass(frozen=True)
class Trainee:
    """What training changes: all of it is in a checkpoint."""

    model: nn.Module
    optimizer: Optimizer
    surgery: Surgery
    device: torch.device

    def checkpoint(self, done: int, live: Live, said: list[str]) -> Checkpoint:
        """Everything that going on after step `done` needs."""
        cuda = self.device.type == "cuda"
        return Checkpoint(
            step=done,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            surgery=self.surgery.state_dict(),
            ledger=live.ledger.state(),
            effects=live.effects.state(),
            said=said,
            rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(self.device) if cuda else None,
        )

    def take_up(self, kept: Checkpoint) -> None:
        """Be, and have the generators be, where the checkpoint was."""
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.surgery.load_state_dict(_moved(kept["surgery"], self.device))
        torch.set_rng_state(kept["rng"])
        if kept["device_rng"] is not None:
            torch.cuda.set_rng_state(kept["device_rng"], self.device)


def _moved(surgery: dict[str, object], device: torch.device) -> dict[str, object]:
    """A surgery's state with its tensors on `device`: a checkpoint is read on the CPU."""
    states = cast(dict[str, dict[str, Tensor]], surgery["states"])
    moved = {
        site: {name: tensor.to(device) for name, tensor in state.items()}
        for site, state in states.items()
    }
    return surgery | {"states": moved}
