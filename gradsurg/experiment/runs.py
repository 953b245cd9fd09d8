"""The runs of an experiment: for each seed a treated run and its control."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from gradsurg.aggregators.sum import Sum
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.controls import ActingControl, control_interventions
from gradsurg.experiment.instantiate import Config, fields_of, instantiate, target_of, user_code
from gradsurg.experiment.optimizers import optimizer_maker
from gradsurg.experiment.run import Run, Schedule
from gradsurg.experiment.run_identity import run_identity
from gradsurg.experiment.schedules import schedule_maker
from gradsurg.experiment.settings import Settings
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.registry import find, names
from gradsurg.sites.base import Selector
from gradsurg.tasks.base import Data, MultiTask, Task
from gradsurg.transforms.identity import Identity


@dataclass(frozen=True)
class Pair:
    """The runs of one seed. `treated` is None with `transform=none`, `control` with `control=none`.

    With `attribute=true`, `without` maps each link to the treated run of the chain that lacks it.
    That run has the identity of the shorter chain, so a sweep over that chain reuses it.
    """

    seed: int
    treated: Run | None
    control: Run | None
    without: Mapping[str, Run] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs in the order of execution."""
        both = (run for run in (self.control, self.treated) if run is not None)
        return (*both, *self.without.values())


@dataclass(frozen=True)
class Plan:
    """The settings that the runs of an experiment share; makes the runs of each seed.

    `combining` is the intervention of the aggregator, `data_hash` that of the files of the task,
    `without` the plans of the chain without each of its links, `split_seed` that of the task if the
    experiment has several.
    """

    config: Config
    settings: Settings
    task: Task
    device: torch.device
    selector: Selector
    intervention: Intervention | None
    combining: Intervention | None
    data_hash: str
    without: "Mapping[str, Plan]" = field(default_factory=dict)
    split_seed: int | None = None

    def pair(self, seed: int) -> Pair:
        """Make the runs of one seed."""
        if self.intervention is None and self.combining is None:
            return Pair(seed, None, self._control(seed))
        control = self._control(seed) if self.settings.control != "none" else None
        treated = self._treated(seed)
        if control is not None:
            treated = replace(treated, controls={self.settings.control: control.name})
        shorter = {link: plan.pair(seed).treated for link, plan in self.without.items()}
        return Pair(seed, treated, control, {link: run for link, run in shorter.items() if run})

    def at_split(self, fields: Config, task: Task, split_seed: int) -> "Plan":
        """Return the plan of the same arms on another split of the data, `task` with `fields`."""
        without = {k: plan.at_split(fields, task, split_seed) for k, plan in self.without.items()}
        config = {**self.config, "task": fields}
        return replace(self, config=config, task=task, split_seed=split_seed, without=without)

    def surgery(self, seed: int) -> Surgery:
        """Make the surgery of the treated run; a plain run has an empty one."""
        return Surgery(*self._interventions, seed=seed)

    @property
    def _interventions(self) -> list[Intervention]:
        return [item for item in (self.intervention, self.combining) if item is not None]

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the transforms in their order, and of the aggregator."""
        combining = self.combining.names if self.combining is not None else ()
        return (*self.config["transform"], *combining)

    def _treated(self, seed: int) -> Run:
        label = "+".join(self._names)
        identity = self._identity(seed, "treated")
        return self._run("treated", label, seed, identity, self.surgery(seed), shadow=False)

    def _control(self, seed: int) -> Run:
        """Make the control run: no surgery, or one of `ActingControl`.

        Without surgery the gradients are measured at the same sites.
        """
        kind = self.settings.control
        if self._interventions and kind != "plain" and kind != "none":
            surgery = Surgery(*control_interventions(self._interventions, kind), seed=seed)
            label = f"{kind}-{'+'.join(self._names)}"
            identity = self._identity(seed, kind)
            return self._run("control", label, seed, identity, surgery, shadow=False)
        measured = [Intervention(Identity(), self.selector, names=("none",))]
        if isinstance(self.task, MultiTask):
            measured.append(Intervention(Sum(), SharedParameters()))
        surgery = Surgery(*measured, seed=seed)
        identity = self._identity(seed, "control")
        return self._run("control", "none", seed, identity, surgery, shadow=True)

    def _identity(
        self, seed: int, arm: Literal["treated", "control"] | ActingControl
    ) -> dict[str, object]:
        settings = self.settings
        chosen: dict[str, object] = {
            "seed": seed,
            "steps": settings.steps,
            "batch_size": settings.batch_size,
            "device": self.device.type,
            "optimizer": optimizer_config(self.config, settings),
            "schedule": self.config["schedule"],
            **settings.compute.identity,
        }
        if settings.until is not None:
            chosen["until"] = f"{settings.until}, tested every {settings.eval_every} steps"
        if settings.set_aside:
            chosen["validation"] = settings.set_aside
        aggregated = self.combining is not None
        return run_identity(self.config, arm, chosen, aggregated, self.data_hash)

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
            make_model=lambda data: create_model(self.config, data),
            make_optimizer=optimizer_maker(optimizer_config(self.config, settings)),
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
                settings.conflict_every,
                settings.set_aside,
                settings.check_ranks,
                settings.log,
            ),
            device=self.device,
            compute=settings.compute,
            metric=settings.metric,
            margin=settings.margin,
            split_seed=self.split_seed,
            config=self.config,
            make_lr_schedule=schedule_maker(self.config["schedule"], settings.steps),
        )


def split_plans(plan: Plan, data: Data | None) -> list[Plan]:
    """Return the plan of each split of the data.

    `data` are those of the first split. Raises ValueError for a task without several splits.
    """
    fields, count = plan.config["task"], plan.settings.splits
    if count == 1:
        return [plan]
    known = _parameters(target_of("tasks", fields))
    if "split_seed" not in known:
        others = [
            name for name in names("tasks") if "split_seed" in _parameters(find("tasks", name))
        ]
        raise ValueError(
            f"must be 1 for a task without split_seed, found {count}; tasks with one: "
            f"{', '.join(others)}"
        )
    first = fields.get("split_seed", known["split_seed"].default)
    plans = []
    for seed in range(first, first + count):
        changed = {**fields, "split_seed": seed}
        plans.append(plan.at_split(changed, instantiate("tasks", changed, Task), seed))
    other = plans[1].task.load_with_validation(plan.settings.set_aside)
    if data and torch.equal(data.train_inputs, other.train_inputs):
        rule = "must be 1 where task.split_seed changes no training data, as with num_train=null"
        raise ValueError(f"{rule}, found {count}")
    return plans


def _parameters(task: object) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(task).parameters if callable(task) else {}


def optimizer_config(config: Config, settings: Settings | None) -> dict[str, object]:
    """Return the name and fields of the optimizer; the short key `lr` replaces its own."""
    fields = dict(config["optimizer"])
    if settings is not None and settings.lr is not None:
        fields["lr"] = settings.lr
    return fields


def create_model(config: Config, data: Data) -> nn.Module:
    """Create a model for the data, with weights drawn from the global generator."""
    fields = config["model"]
    target = target_of("models", fields)
    options = data.model_options(target, fields_of(fields))
    with user_code(fields):
        args, options = _model_arguments(target, data, options, "_target_" in fields)
        model = call_with_fields(target, args, options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"must make a torch.nn.Module, found {model!r}")
    return model


def _model_arguments(
    target: object, data: Data, options: dict[str, object], theirs: bool
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a model: `input_shape` and `num_outputs`, as far as it takes them.

    A user's class or function (`theirs`) gets them by name, or if it requires two arguments of
    other names, in this order.
    """
    sizes = {"input_shape": data.input_shape, "num_outputs": data.num_outputs}
    both = tuple(sizes.values())
    if not theirs or not callable(target):
        return both, options
    parameters = inspect.signature(target).parameters.values()
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [param for param in parameters if param.name not in options and param.kind not in stars]
    required = [param.name for param in taken if param.default is param.empty]
    positional = all(param.kind is not param.KEYWORD_ONLY for param in taken)
    if positional and len(required) == len(sizes) and not set(required) <= set(sizes):
        return both, options
    if not taken and any(param.kind is param.VAR_POSITIONAL for param in parameters):
        return both, options
    if missing := [name for name in required if name not in sizes]:
        text = "needs a value: a model is given input_shape and num_outputs, if it takes them"
        raise FieldError("", [(name, text) for name in missing])
    names = {param.name for param in taken}
    return (), {**{name: size for name, size in sizes.items() if name in names}, **options}
