"""A run: one arm of a study with one seed, with all that is needed to train it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.core.surgery import Surgery
from gradsurg.effects.summary import AUTO
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run_directory import first_control
from gradsurg.experiment.run_identity import directory_name, environment
from gradsurg.experiment.settings import Backend, Config, Precision, Until
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import Data, Task
from gradsurg.triggers.for_task import ForTask

ArmName = Literal["treated", "control"]

COMPILER_WARNINGS = (
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.jit.script_method` is deprecated",
)
"""Warnings of PyTorch's compiler about PyTorch's own code."""


@dataclass(frozen=True)
class Schedule:
    """The length of a run and the intervals of its logs, in optimizer steps.

    Checkpoints are at least `checkpoint_seconds` apart, except for the last step's. The run
    ends at the first evaluation that reaches `until`. With `validation`, the share of the training
    examples that is set aside, these are evaluated during training, and the test data at the end.
    The weights of several processes are compared every `check_ranks` steps, never if 0. `log` says
    which sites' effects the loggers get.
    """

    steps: int
    batch_size: int
    log_every: int
    checkpoint_every: int
    effects_every: int
    eval_every: int = 0
    checkpoint_seconds: float = 0.0
    until: Until | None = None
    conflict_every: int = 1
    validation: float = 0.0
    check_ranks: int = 0
    log: str = AUTO


@dataclass(frozen=True)
class ComputeOptions:
    """Gradient accumulation, precision of the forward pass, the backend to compile with, and the
    number of processes that share each batch.
    """

    accumulate: int = 1
    precision: Precision = "float32"
    compile: Backend | None = None
    ranks: int = 1

    @property
    def identity(self) -> dict[str, object]:
        """The part of a run's identity; `ranks` if there are several."""
        return {key: own for key, own in vars(self).items() if key != "ranks" or self.ranks > 1}

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype for `torch.autocast`, or None for the model's own precision."""
        return None if self.precision == "float32" else getattr(torch, self.precision)

    def scaler(self, device: torch.device) -> GradScaler | None:
        """Return a gradient scaler for float16, whose small gradients would vanish, or None."""
        return GradScaler(device.type) if self.precision == "float16" else None

    @contextmanager
    def compiled(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the compiled model, or the model itself; the compiler's caches are reset after.

        Use it inside the block of the surgery: compiled code does not see hooks added later.
        """
        if self.compile is None:
            yield model
            return
        with warnings.catch_warnings():
            for message in COMPILER_WARNINGS:
                warnings.filterwarnings("ignore", message)
            # PyTorch compiles the same code a few times only, then it runs uncompiled: a process
            # has many runs.
            torch.compiler.reset()
            try:
                compiled: Any = torch.compile(model, backend=self.compile)  # Any: typed as function
                yield compiled
            finally:
                torch.compiler.reset()


def check_compiled(selector: Selector) -> None:
    """Raise ValueError if a site kind behaves differently in a compiled model."""
    for kind in selector.leaves:
        if kind.compile_limit:
            raise ValueError(
                f"{type(kind).__name__} cannot act in a compiled model: {kind.compile_limit}. "
                "Choose Parameters, Outputs, Inputs or Activations, or compile=false"
            )


@dataclass(frozen=True)
class Run:
    """One arm with one seed. `identity` is the config that identifies it (see `run_identity`).

    `metric` is the outcome that the verdict is about; None: the first of the task's. `margin` is
    the difference up to which it calls two arms equivalent.
    """

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
    controls: Mapping[str, str] = field(default_factory=dict)  # directory names, by kind of control
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    metric: str | None = None
    margin: str | None = None
    split_seed: int | None = None  # of the task, in a study of several splits
    config: Config = field(default_factory=dict)  # by which other processes build the run
    make_lr_schedule: Callable[[Optimizer], LRScheduler | None] = lambda optimizer: None

    def load_data(self) -> Data:
        """Load the task's data, with the validation part of the schedule."""
        return self.task.load_with_validation(self.schedule.validation)

    def batches(self, data: Data, device: torch.device, rank: int = 0, ranks: int = 1) -> Batches:
        """Return the batches of the training examples, on a device."""
        return Batches(
            data.train_inputs.to(device),
            data.train_targets.to(device),
            self.schedule.batch_size,
            self.seed,
            self.compute.accumulate,
            data.order.batches if data.order is not None else None,
            data.epoch_size,
            rank,
            ranks,
        )

    @property
    def backward_per_task(self) -> bool:
        """Whether each task's loss has its own backward pass: an aggregator or trigger needs it."""
        return any(
            item.aggregator or any(isinstance(part, ForTask) for part in item.when.parts)
            for item in self.surgery.interventions
        )

    @property
    def facts(self) -> dict[str, object]:
        """The content of `run.json`: facts for readers of the directory before the run ends."""
        return {
            "study": self.study,
            "arm": self.arm,
            "label": self.label,
            "seed": self.seed,
            "tags": list(self.tags),
            "steps": self.schedule.steps,
            "control": first_control(self.controls),
            "controls": dict(self.controls),
            "measured": self.measured,
            "made_with": environment(),
        }

    @property
    def measured(self) -> dict[str, int | str | None]:
        """The intervals of measurements, and metric and margin of the verdict: not in the identity.

        Without a margin that key is left out.
        """
        schedule = self.schedule
        return {
            "effects_every": schedule.effects_every,
            "conflict_every": schedule.conflict_every,
            "eval_every": schedule.eval_every,
            "metric": self.metric,
            **({"margin": self.margin} if self.margin is not None else {}),
        }

    def measurement_note(self, facts: Mapping[str, Any]) -> str:  # Any: any JSON value
        """Return a note if a finished run with these facts was measured at other intervals."""
        before = facts.get("measured") or {}
        different = [
            f"{key}={'null' if before[key] is None else before[key]}"
            for key, asked in self.measured.items()
            if asked and before.get(key, asked) != asked
        ]
        return f"measured with {', '.join(different)}" if different else ""

    @property
    def title(self) -> str:
        """Its name for readers, `<label>-seed<seed>`; among several splits also `-split<seed>`.

        In a study that is not named after task and model, `-<task>-<model>` at the end.
        """
        split = "" if self.split_seed is None else f"-split{self.split_seed}"
        options = [self.identity.get(group) for group in ("task", "model")]
        fields = [each for each in options if isinstance(each, Mapping)]
        names = "".join(f"-{each.get('name') or each['_target_']}" for each in fields)
        setting = "" if names == f"-{self.study}" else names
        return f"{self.label}-seed{self.seed}{split}{setting}"

    @cached_property
    def name(self) -> str:
        """The name of its directory: `<label>-seed<seed>-<hash8>`."""
        return directory_name(f"{self.label}-seed{self.seed}", self.identity)

    def directory(self, out: Path) -> Path:
        """Return the path of its directory: `<out>/<study>/<name>`."""
        return out / self.study / self.name


@dataclass(frozen=True)
class Pair:
    """The runs of one seed. `treated` is None with `transform=none`.

    `controls` maps each kind of control to its run; it is empty with `control=none`. With
    `attribute=true`, `without` maps each link to the treated run of the chain that lacks it.
    That run has the identity of the shorter chain, so a sweep over that chain reuses it.
    """

    seed: int
    treated: Run | None
    controls: Mapping[str, Run]
    without: Mapping[str, Run] = field(default_factory=dict)

    @property
    def control(self) -> Run | None:
        """The control that the verdict is about."""
        return first_control(self.controls)

    @property
    def roles(self) -> dict[str, Run]:
        """The runs by their role in a comparison, in the order of execution."""
        controls = {f"control {kind}": run for kind, run in self.controls.items()}
        treated = {} if self.treated is None else {"treated": self.treated}
        return controls | treated | {f"without {link}": run for link, run in self.without.items()}

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs in the order of execution."""
        return (*self.roles.values(),)


def paired(
    seed: int, treated: Run | None, controls: Mapping[str, Run], without: Mapping[str, Run]
) -> Pair:
    """Return the runs of one seed, of which each treated one names the controls."""
    names = {kind: run.name for kind, run in controls.items()}
    named = {link: replace(run, controls=names) for link, run in without.items()}
    return Pair(seed, treated and replace(treated, controls=names), controls, named)
