"""The runs of an experiment, seed by seed: a treated one and its control, and their identities."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch

from gradsurg.aggregators.base import NormMatchedSum
from gradsurg.aggregators.sum import Sum
from gradsurg.config.make import Config
from gradsurg.config.optimizers import MakeOptimizer, optimizer_config
from gradsurg.config.parts import model_of
from gradsurg.config.schedules import schedule_maker
from gradsurg.config.settings import Settings
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.sites.base import Selector
from gradsurg.surgery.intervention import Intervention
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import MultiTask, Task
from gradsurg.training.run import Run, Schedule
from gradsurg.training.run_identity import run_identity
from gradsurg.transforms.identity import Identity
from gradsurg.transforms.norm_matched import NormMatched


@dataclass(frozen=True)
class Pair:
    """The two runs of one seed; either can be missing: `transform=none` is a plain run.

    An attribution has one more for each link of the chain: the treated run of the chain without it.
    It is recognised by that alone, so a sweep that has the shorter chain has the same run.
    """

    seed: int
    treated: Run | None
    control: Run | None
    without: Mapping[str, Run] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of them, in the order in which they are done."""
        both = (run for run in (self.control, self.treated) if run is not None)
        return (*both, *self.without.values())


@dataclass(frozen=True)
class Plan:
    """What the runs of an experiment have in common."""

    config: Config
    settings: Settings
    task: Task
    make_optimizer: MakeOptimizer
    device: torch.device
    selector: Selector
    intervention: Intervention | None
    joint: Intervention | None = None  # that of the aggregator
    without: "Mapping[str, Plan]" = field(default_factory=dict)  # those of the chain less a link
    content: str = ""  # what stands for the task's files

    def pair(self, seed: int) -> Pair:
        """The runs of one seed."""
        if self.intervention is None and self.joint is None:
            return Pair(seed, None, self._control(seed))
        control = self._control(seed) if self.settings.control != "none" else None
        treated = self._treated(seed)
        if control is not None:
            treated = replace(treated, controls={self.settings.control: control.name})
        shorter = {link: plan.pair(seed).treated for link, plan in self.without.items()}
        return Pair(seed, treated, control, {link: run for link, run in shorter.items() if run})

    def surgery(self, seed: int) -> Surgery:
        """That of the treated run, empty for a plain one."""
        return Surgery(*(own for own in (self.intervention, self.joint) if own), seed=seed)

    @property
    def _names(self) -> tuple[str, ...]:
        """Of the transforms in their order, and of the aggregator."""
        joint = self.joint.names if self.joint is not None else ()
        return (*self.config["transform"], *joint)

    def _treated(self, seed: int) -> Run:
        label = "+".join(self._names)
        identity = self._identity(seed, "treated")
        return self._run("treated", label, seed, identity, self.surgery(seed), shadow=False)

    def _control(self, seed: int) -> Run:
        """No surgery, measured at the same sites; or the plain direction with the treated norm."""
        own = self.intervention, self.joint
        if any(own) and self.settings.control == "norm_matched":
            surgery = Surgery(*(_matched(item) for item in own if item), seed=seed)
            label = "norm_matched-" + "+".join(self._names)
            identity = self._identity(seed, "norm_matched")
            return self._run("control", label, seed, identity, surgery, shadow=False)
        measured = [Intervention(Identity(), self.selector, names=("none",))]
        if isinstance(self.task, MultiTask):
            measured.append(Intervention(Sum(), SharedParameters()))  # called "sum"
        surgery = Surgery(*measured, seed=seed)
        identity = self._identity(seed, "control")
        return self._run("control", "none", seed, identity, surgery, shadow=True)

    def _identity(
        self, seed: int, arm: Literal["treated", "control", "norm_matched"]
    ) -> dict[str, object]:
        settings = self.settings
        chosen: dict[str, object] = {
            "seed": seed,
            "steps": settings.steps,
            "batch_size": settings.batch_size,
            "device": self.device.type,
            "optimizer": optimizer_config(self.config, settings),
            "schedule": self.config["schedule"],
            **asdict(settings.compute),
        }
        if settings.until is not None:
            chosen["until"] = f"{settings.until}, tested every {settings.eval_every} steps"
        aggregated = self.joint is not None
        return run_identity(self.config, arm, chosen, aggregated, self.content)

    def _run(
        self,
        arm: Literal["treated", "control"],
        label: str,
        seed: int,
        identity: dict[str, object],
        surgery: Surgery,
        shadow: bool,
    ) -> Run:
        settings = self.settings
        return Run(
            study=settings.study,
            arm=arm,
            label=label,
            seed=seed,
            identity=identity,
            # A control is of every treated arm that has its site and seed.
            tags=self._names if arm == "treated" else (label.split("-")[0],),
            task=self.task,
            make_model=lambda data: model_of(self.config, data),
            make_optimizer=self.make_optimizer,
            surgery=surgery,
            shadow=shadow,
            schedule=Schedule(
                settings.steps,
                settings.batch_size,
                settings.log_every,
                settings.checkpoint_every,
                settings.effects_every,
                settings.eval_every,
                settings.update_effect_every,
                settings.checkpoint_seconds,
                settings.until,
            ),
            device=self.device,
            compute=settings.compute,
            make_lr_schedule=schedule_maker(self.config["schedule"], settings.steps),
        )


def _matched(item: Intervention) -> Intervention:
    """The plain direction with the norm of what an intervention makes."""
    aggregator = item.aggregator
    made = NormMatched(item.operator) if aggregator is None else NormMatchedSum(aggregator)
    names = ("norm_matched",) if aggregator is None else ("norm_matched_sum",)
    return replace(item, transform=made, names=names)
