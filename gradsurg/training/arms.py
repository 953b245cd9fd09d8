"""An arm with one seed: what a run is made of and recognised by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, Task
from gradsurg.training.controls import first_control
from gradsurg.training.run_identity import directory_name, environment
from gradsurg.training.switches import Switches
from gradsurg.training.until import Until
from gradsurg.triggers.for_task import ForTask

ArmName = Literal["treated", "control"]
PLAIN = Switches()


@dataclass(frozen=True)
class Schedule:
    """How long a run is, how often it logs and is saved, in optimizer steps.

    It is not saved anew before `checkpoint_seconds` have passed, but for its last step. The first
    test that reaches `until` is its end.
    """

    steps: int
    batch_size: int
    log_every: int
    checkpoint_every: int
    effects_every: int
    eval_every: int = 0
    update_effect_every: int = 0
    checkpoint_seconds: float = 0.0
    until: Until | None = None


@dataclass(frozen=True)
class Run:
    """One arm with one seed. `identity` is the resolved config that the run is recognised by."""

    study: str
    arm: ArmName
    label: str
    seed: int
    identity: dict[str, object]
    tags: tuple[str, ...]
    task: Task
    make_model: Callable[[Data], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    surgery: Surgery
    shadow: bool
    schedule: Schedule
    device: torch.device
    # the names of the directories of the runs that it is compared with, by the kind of control
    controls: Mapping[str, str] = field(default_factory=dict)
    switches: Switches = PLAIN
    make_lr_schedule: Callable[[Optimizer], LRScheduler | None] = lambda optimizer: None

    @property
    def several(self) -> bool:
        """Whether the losses of its tasks go back one by one: something asks whose they are."""
        items = self.surgery.interventions
        return any(
            item.aggregator or any(isinstance(part, ForTask) for part in item.when.parts)
            for item in items
        )

    @property
    def facts(self) -> dict[str, object]:
        """What readers of its directory should know before there is an outcome."""
        return {
            "study": self.study,
            "arm": self.arm,
            "label": self.label,
            "seed": self.seed,
            "tags": list(self.tags),
            "steps": self.schedule.steps,
            "control": self.control,
            "controls": dict(self.controls),
            "measured": self.measured,
            "made_with": environment(),
        }

    @property
    def control(self) -> str | None:
        """The name of the directory of the run that it is compared with first."""
        return first_control(self.controls)

    @property
    def measured(self) -> dict[str, int]:
        """How often is measured what changes no training, so that no identity tells it."""
        every = self.schedule
        return {
            "effects_every": every.effects_every,
            "eval_every": every.eval_every,
            "update_effect_every": 0 if self.shadow else every.update_effect_every,
        }

    def measured_otherwise(self, facts: Mapping[str, object]) -> str:
        """What a finished run with those facts was measured with, where that is not as asked."""
        before = facts.get("measured")
        if not isinstance(before, Mapping):
            return ""
        told = [
            f"{key}={before[key]}"
            for key, asked in self.measured.items()
            if asked and before.get(key, asked) != asked
        ]
        return f"was measured with {', '.join(told)}; force=true measures anew" if told else ""

    @property
    def name(self) -> str:
        """Its directory's: `<label>-seed<seed>-<hash8>`."""
        return directory_name(f"{self.label}-seed{self.seed}", self.identity)

    def directory(self, out: Path) -> Path:
        """Where it lies: `<out>/<study>/<name>`."""
        return out / self.study / self.name
