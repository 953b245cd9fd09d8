"""The experiment of a config: for each seed a treated run and its control."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.aggregators.sum import Sum
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment import processes
from gradsurg.experiment.controls import ArmKind, control_interventions
from gradsurg.experiment.making import call_of, make, user_code
from gradsurg.experiment.optimization import make_optimizer, make_schedule
from gradsurg.experiment.own_code import import_path
from gradsurg.experiment.run import ComputeOptions, Pair, Run, Schedule, paired
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_identity import run_identity
from gradsurg.experiment.settings import SPLIT_SEEDS, Config, ControlKind, Settings
from gradsurg.experiment.tuning import Tuning
from gradsurg.loggers.base import GuardedLogger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.registry import find, is_own, names
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import Data, MultiTask, Task
from gradsurg.transforms.identity import Identity


@dataclass(frozen=True)
class Experiment:
    """The checked objects of one config. It holds no data and no model: a sweep keeps many.

    `combining` is the intervention of the aggregator, `data_hash` the hash of the task's files.
    `without` has an experiment for each link of the chain, which leaves the link out. With several
    splits of the data, `splits` has an experiment for each, and `split_seed` is the task's seed.
    """

    config: Config
    settings: Settings
    task: Task
    device: torch.device
    selector: Selector
    intervention: Intervention | None
    combining: Intervention | None
    data_hash: str
    loggers: tuple[GuardedLogger, ...] = ()
    without: "Mapping[str, Experiment]" = field(default_factory=dict)
    splits: "tuple[Experiment, ...]" = ()
    split_seed: int | None = None
    tuning: Tuning | None = None

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The runs with the values of the config, which with `tuning` are not trained.

        Each split has seeds of its own: shared seeds would make the differences of the splits
        dependent, and the test over the splits would reject too often.
        """
        return tuple(
            split.pair(SPLIT_SEEDS * place + seed)
            for place, split in enumerate(self.splits or [self])
            for seed in self.settings.all_seeds
        )

    @property
    def compared(self) -> tuple[Pair, ...] | None:
        """The runs to compare, with tuning at the chosen values; None before tuning has ended."""
        return self.tuning.pairs(self.settings) if self.tuning else self.pairs

    @property
    def runs(self) -> list[Run]:
        """All known runs, of the tuning and of the comparison."""
        tuned = self.tuning.runs if self.tuning else []
        return [*tuned, *(run for pair in self.compared or () for run in pair.runs)]

    @property
    def is_finished(self) -> bool:
        """Whether all runs have finished before, so that nothing will be trained."""
        if self.settings.force or self.compared is None:
            return False
        out = self.settings.out_folder
        return all(RunDirectory(run.directory(out)).finished for run in self.runs)

    @cached_property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions of the treated arm; a plain run has none."""
        return tuple(item for item in (self.intervention, self.combining) if item is not None)

    @cached_property
    def surgery(self) -> Surgery:
        """The surgery of the treated arm, with seed 0."""
        return Surgery(*self.interventions)

    @property
    def example_input(self) -> Tensor:
        """Two examples of the task's data."""
        return self.load_data().train_inputs[:2]

    def load_data(self) -> Data:
        """Load the data of the task."""
        return self.task.load()

    def make_model(self, data: Data | None = None) -> nn.Module:
        """Create a model, with weights drawn from the global generator."""
        return create_model(self.config, data or self.load_data())

    def pair(self, seed: int) -> Pair:
        """Make the runs of one seed."""
        controls = {kind: _with_seed(arm, seed) for kind, arm in self._controls.items()}
        shorter = {link: plan._treated for link, plan in self.without.items()}
        without = {link: _with_seed(arm, seed) for link, arm in shorter.items() if arm is not None}
        treated = self._treated and _with_seed(self._treated, seed)
        return paired(seed, treated, controls, without)

    @property
    def optimizer(self) -> dict[str, object]:
        """The name and fields of the optimizer; the short key `lr` replaces its own."""
        lr = self.settings.lr
        return {**self.config["optimizer"], **({} if lr is None else {"lr": lr})}

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the transforms in their order, and of the aggregator."""
        combining = self.combining.names if self.combining is not None else ()
        return (*self.config["transform"], *combining)

    @cached_property
    def _treated(self) -> Run | None:
        if not self.interventions:
            return None
        return self._run("treated", "+".join(self._names), self._names, self.interventions)

    @cached_property
    def _controls(self) -> Mapping[str, Run]:
        """The control runs by their kind; without a treated arm the plain one alone."""
        kinds = self.settings.controls if self.interventions else ("plain",)
        return {kind: self._control(kind) for kind in kinds}

    def _control(self, kind: ControlKind) -> Run:
        """Make the run of a control arm: no surgery, or an `ActingControl`.

        Without surgery the gradients are measured at the same sites.
        """
        if kind != "plain" and kind != "none":
            items = control_interventions(self.interventions, kind)
            return self._run(kind, f"{kind}-{'+'.join(self._names)}", (kind,), items)
        items = (Intervention(Identity(), self.selector, names=("none",)),)
        if isinstance(self.task, MultiTask):
            items += (Intervention(Sum(), SharedParameters()),)
        return self._run("control", "none", ("none",), items)

    def _run(
        self,
        kind: ArmKind,
        label: str,
        tags: tuple[str, ...],
        items: tuple[Intervention, ...],
    ) -> Run:
        """Make the run of an arm with seed 0; the controls of a treated arm are given later."""
        settings, schedule = self.settings, self.config["schedule"]
        # Any: the values of fields by name; the share for validation has a default of its own.
        lengths: dict[str, Any] = {
            each.name: getattr(settings, each.name) for each in fields(Schedule)
        }
        lengths["validation"] = settings.set_aside
        return Run(
            study=settings.study,
            arm="treated" if kind == "treated" else "control",
            label=label,
            seed=0,
            identity=self._identity(kind),
            tags=tags,
            task=self.task,
            make_model=self.make_model,
            make_optimizer=partial(make_optimizer, self.optimizer),
            surgery=Surgery(*items),
            shadow=kind == "control",
            schedule=Schedule(**lengths),
            device=self.device,
            compute=self.compute,
            metric=settings.metric,
            margin=settings.margin,
            split_seed=self.split_seed,
            config=self.config,
            make_lr_schedule=partial(make_schedule, schedule, settings.steps),
        )

    @property
    def compute(self) -> ComputeOptions:
        """The computation of steps."""
        settings = self.settings
        backend = settings.compile_backend if settings.compile else None
        return ComputeOptions(
            settings.accumulate, settings.precision, backend, processes.launched()
        )

    def _identity(self, kind: ArmKind) -> dict[str, object]:
        settings = self.settings
        chosen: dict[str, object] = {
            "seed": 0,
            "steps": settings.steps,
            "batch_size": settings.batch_size,
            "device": self.device.type,
            "optimizer": self.optimizer,
            "schedule": self.config["schedule"],
            **self.compute.identity,
        }
        if settings.until is not None:
            chosen["until"] = f"{settings.until}, tested every {settings.eval_every} steps"
        if settings.set_aside:
            chosen["validation"] = settings.set_aside
        aggregated = self.combining is not None
        return run_identity(self.config, kind, chosen, aggregated, self.data_hash)


def _with_seed(arm: Run, seed: int) -> Run:
    surgery = Surgery(*arm.surgery.interventions, seed=seed)
    return replace(arm, seed=seed, identity=arm.identity | {"seed": seed}, surgery=surgery)


def on_splits(experiment: Experiment, data: Data) -> Experiment:
    """Return the experiment with `splits=` splits of the data; `data` is the first split's.

    Raises ValueError for a task without several splits.
    """
    config, count = experiment.config["task"], experiment.settings.splits
    if count == 1:
        return experiment
    known = _parameters(import_path(config["_target_"]))
    if "split_seed" not in known:
        others = [
            each for each in names("tasks") if "split_seed" in _parameters(find("tasks", each))
        ]
        rule = f"must be 1 for a task without split_seed, found {count}"
        raise ValueError(f"{rule}; tasks with one: {', '.join(others)}")
    first = config.get("split_seed", known["split_seed"].default)
    splits = tuple(_on_split(experiment, seed) for seed in range(first, first + count))
    other = splits[1].task.load_with_validation(experiment.settings.set_aside)
    if torch.equal(data.train_inputs, other.train_inputs):
        rule = "must be 1 where task.split_seed changes no training data, as with num_train=null"
        raise ValueError(f"{rule}, found {count}")
    return replace(experiment, splits=splits)


def _on_split(experiment: Experiment, seed: int) -> Experiment:
    """Return the experiment with the same arms on another split of the data."""
    task = {**experiment.config["task"], "split_seed": seed}
    return replace(
        experiment,
        config={**experiment.config, "task": task},
        task=make(task, Task),
        split_seed=seed,
        without={link: _on_split(plan, seed) for link, plan in experiment.without.items()},
    )


def _parameters(task: object) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(task).parameters if callable(task) else {}


def create_model(config: Config, data: Data) -> nn.Module:
    """Create a model for the data, with weights drawn from the global generator."""
    options = config["model"]
    target, fields = call_of(options)
    given = data.model_options(target, fields)
    sizes = {"input_shape": data.input_shape, "num_outputs": data.num_outputs}
    with user_code(options):
        by_name = _sizes_by_name(target, given, sizes) if not is_own(options) else None
        args = (*sizes.values(),) if by_name is None else ()
        model = call_with_fields(target, args, {**(by_name or {}), **given})
    if not isinstance(model, nn.Module):
        raise TypeError(f"must make a torch.nn.Module, found {model!r}")
    return model


def _sizes_by_name(
    target: object, given: Mapping[str, object], sizes: Mapping[str, object]
) -> dict[str, object] | None:
    """Return those of `sizes` that a user's class or function takes by name.

    None if it is to get both in their order: it requires two arguments of other names.
    """
    known = [param for param in _parameters(target).values() if param.name not in given]
    taken = [
        param for param in known if param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
    ]
    required = [param.name for param in taken if param.default is param.empty]
    positional = all(param.kind is not param.KEYWORD_ONLY for param in taken)
    if not taken and any(param.kind is param.VAR_POSITIONAL for param in known):
        return None
    if positional and len(required) == len(sizes) and not set(required) <= set(sizes):
        return None
    if missing := [name for name in required if name not in sizes]:
        text = "needs a value: a model is given input_shape and num_outputs, if it takes them"
        raise FieldError("", [(name, text) for name in missing])
    return {param.name: sizes[param.name] for param in taken if param.name in sizes}
