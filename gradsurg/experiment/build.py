"""Build the objects of an experiment from a resolved config, and check them all."""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.aggregators.base import Aggregator, LossWeighting
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment import processes
from gradsurg.experiment.compose import GROUPS
from gradsurg.experiment.controls import control_interventions
from gradsurg.experiment.errors import ConfigError, ErrorCollector, joined
from gradsurg.experiment.instantiate import Config, instantiate, user_code
from gradsurg.experiment.overrides import MAX_RUNS, too_many
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.runs import Pair, Plan, create_model, split_plans
from gradsurg.experiment.settings import Settings
from gradsurg.experiment.trial_step import (
    check_first_step,
    check_metrics,
    check_model,
    check_optimizer,
    check_places,
    check_settings,
    few_examples,
    metric_names,
)
from gradsurg.experiment.tuning import FIRST_SEED, Candidate, Tuning, configs, tuning_metric
from gradsurg.loggers.base import GuardedLogger, Logger
from gradsurg.multitask.aggregation import check_trigger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import nearest
from gradsurg.plugins.registry import find, names, snake
from gradsurg.sites.base import Selector
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, MultiTask, Task
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain, links_of
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger
from gradsurg.triggers.steps import Steps

MAPPINGS = ("shared",)
REQUIRED = ("site", "when", "model", "task", "optimizer", "schedule")


@dataclass(frozen=True)
class Experiment:
    """The checked objects of one config. It holds no data and no model: a sweep keeps many.

    `pairs` are the runs with the values of the config, which with `tuning` are not trained.
    """

    settings: Settings
    pairs: tuple[Pair, ...]
    surgery: Surgery
    config: Config
    task: Task
    loggers: tuple[GuardedLogger, ...]
    plan: Plan
    tuning: Tuning | None = None

    @property
    def compared(self) -> tuple[Pair, ...] | None:
        """The runs to compare, with tuning at the chosen values; None before tuning has ended."""
        return self.tuning.pairs(self.settings) if self.tuning else self.pairs

    @property
    def runs(self) -> list[Run]:
        """All runs that are known: those of the tuning, and those to compare."""
        tuned = self.tuning.runs if self.tuning else []
        return [*tuned, *(run for pair in self.compared or () for run in pair.runs)]

    def load_data(self) -> Data:
        """Load the data of the task."""
        return self.task.load()

    def make_model(self, data: Data | None = None) -> nn.Module:
        """Create a model, with weights drawn from the global generator."""
        return create_model(self.config, data or self.load_data())

    @property
    def example_input(self) -> Tensor:
        """Two examples of the task's data."""
        return self.load_data().train_inputs[:2]

    @property
    def is_finished(self) -> bool:
        """Whether all runs have finished before, so that nothing will be trained."""
        out = Path(self.settings.out)
        if self.settings.force or self.compared is None:
            return False
        return all(RunDirectory(run.directory(out)).finished for run in self.runs)


def build(config: Config, trial: bool = True) -> Experiment:
    """Build every object of an experiment, and try one training step.

    Raises ConfigError with all errors. The trial step is left out without `trial`, if all runs have
    finished, or if the config asks for 0 steps.
    """
    _check_keys(config)
    errors = ErrorCollector()
    settings = errors.attempt("", lambda: _settings(config))
    transforms = _transforms(config, errors)
    selector = _selector(config, errors)
    trigger = errors.made("when", lambda: instantiate("triggers", config["when"], Trigger))
    intervention = _intervention(transforms, selector, trigger, errors)
    task, data = _task(config, settings.set_aside if settings is not None else 0, errors)
    combining = _combining(config, task, trigger, errors)
    loggers = _loggers(config, errors)
    content = model = device = None
    if task is not None and data is not None:
        content = errors.attempt("task", lambda: _content(config, task))
        model = errors.attempt("model", lambda: _model(config, data))
    if settings is not None:
        device = errors.attempt("device", lambda: _device(settings.device))
        check_settings(settings, selector, intervention, combining, device, data, errors)
        _check_attribute(settings, config, errors)
        _check_control(settings, intervention, combining, errors)
        if settings.compute.ranks > 1:
            _check_processes(settings, intervention, combining, model, errors)
    finite = errors.passes("", lambda: _check_finite(config, errors))
    experiment = None
    if not errors.lines and settings and task and selector and device:
        plan = Plan(
            config, settings, task, device, selector, intervention, combining, content or ""
        )
        _check_number_of_runs(plan)
        if settings.attribute:
            plan = replace(plan, without=_without_links(plan, transforms, trigger, errors))
        plans = errors.attempt("splits", lambda: split_plans(plan, data)) or [plan]
        experiment = _experiment(plans, loggers)
        if settings.tune is not None and model is not None and data is not None:
            made = model
            tuning = errors.attempt("tune", lambda: _tuning(config, settings, task, made, data))
            experiment = replace(experiment, tuning=tuning)
    if settings is not None and settings.steps == 0:
        if not (task and data and model and check_model(task, model, data, errors)):
            model = None
        check_places(config, settings, selector, combining, model, errors)
    elif experiment is None or not experiment.is_finished:
        if finite:
            check_optimizer(config, settings, model, errors)
        if task and data and model and not (finite and selector):
            check_model(task, model, data, errors)
        elif trial and task and data and model and selector:
            # A step of a user's own model or task may differ from the next one.
            certain = "name" in config["model"] and "name" in config["task"]
            used = trigger if config.get("transform") or combining else None
            if check_first_step(
                task,
                data,
                model,
                settings,
                selector,
                used,
                intervention,
                combining,
                certain,
                errors,
            ):
                check_metrics(config, settings, task, model, data, errors)
    elif experiment.settings.metric and task and data and model:
        check_metrics(config, settings, task, model, data, errors)
    errors.raise_if_any()
    assert experiment  # a missing part has an error, and `raise_if_any` has raised it
    return experiment


def build_surgery(config: Config) -> Surgery:
    """Build the surgery of a config of the groups of a recipe. Raises ConfigError."""
    errors = ErrorCollector()
    transforms = _transforms(config, errors)
    selector = _selector(config, errors)
    trigger = errors.made("when", lambda: instantiate("triggers", config["when"], Trigger))
    item = _intervention(transforms, selector, trigger, errors)
    combining = _combining(config, None, trigger, errors)
    seed = config.get("seed") or 0
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        errors.add("seed", f"must be a whole number >= 0, found {seed!r}")
    errors.raise_if_any()
    # As written in Python: one transform is no chain, default names and triggers are left out.
    if item is not None and len(transforms) == 1:
        item = replace(item, transform=next(iter(transforms.values())))
    items = [one for one in (item, combining) if one is not None]
    items = [replace(one, when=Always()) if one.when == Steps() else one for one in items]
    unnamed = [replace(one, names=()) for one in items]
    pairs = zip(items, unnamed, strict=True)
    items = [short if labels_of(short) == one.names else one for one, short in pairs]
    return Surgery(*items, seed=seed)


def _experiment(plans: Sequence[Plan], loggers: tuple[GuardedLogger, ...]) -> Experiment:
    plan, settings = plans[0], plans[0].settings
    pairs = tuple(split.pair(seed) for split in plans for seed in settings.all_seeds)
    return Experiment(settings, pairs, plan.surgery(0), plan.config, plan.task, loggers, plan)


def _tuning(config: Config, settings: Settings, task: Task, model: nn.Module, data: Data) -> Tuning:
    """Build the experiment of each point of the grid. Raises ValueError for the first wrong one."""
    assert settings.tune is not None
    seeds = range(FIRST_SEED, FIRST_SEED + settings.tune_seeds)
    if common := {*seeds} & {*settings.all_seeds}:
        raise ValueError(f"{min(common)} is one of the tuning seeds, and cannot be compared too")
    with untouched(model):
        names = metric_names(task, model, *few_examples(data))
    metric, lower = tuning_metric(settings, names)
    candidates = []
    for values, changed in configs(config, settings.tune, settings):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SurgeryWarning)  # those of the config are enough
                plan = build(changed, trial=False).plan
        except ConfigError as error:
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            raise ValueError(f"{shown}: {error.faults[0]}") from error
        candidates.append(Candidate(values, plan))
    return Tuning(settings.tune, metric, lower, seeds, tuple(candidates))


def _check_number_of_runs(plan: Plan) -> None:
    """Refuse very many runs before they are made, unless `yes` is given."""
    seeds, grid = len(plan.settings.all_seeds), plan.settings.tune
    if grid is not None:
        seeds += plan.settings.tune_seeds * len(grid)
    count = seeds * plan.settings.splits * len(plan.pair(0).runs)
    if count > MAX_RUNS and not plan.settings.yes:
        key = "tune" if grid is not None else "seeds"
        raise ConfigError([f"{key}: {too_many(count, 'runs')}"])


def _check_finite(config: Config, errors: ErrorCollector) -> None:
    """Report NaN and infinities, unless their keys have an error already."""
    for key, value in _numbers(config):
        if not math.isfinite(value) and not any(
            line.startswith(f"{key}: ") for line in errors.lines
        ):
            errors.add(key, f"must be finite, found {value}")


def _numbers(value: object, *keys: str) -> Iterator[tuple[str, float]]:
    """Yield the floating-point numbers in a config with their keys."""
    match value:
        case float():
            yield joined(*keys), value
        case Mapping():
            for key, item in value.items():
                yield from _numbers(item, *keys, str(key))
        case list():
            for index, item in enumerate(value):
                yield from _numbers(item, *keys, str(index))


def _check_keys(config: Config) -> None:
    """Refuse unknown keys at the top of the config, and missing groups."""
    known = [*GROUPS, *MAPPINGS, *Settings.__annotations__]
    faults = [
        "experiment: its file must begin with the line '# @package _global_'"
        if key == "experiment"
        else f"{key}: is not a key here. {nearest(key, known)}"
        for key in config
        if key not in known
    ]
    faults += [
        f"{key}: is required, a mapping with a name"
        for key in REQUIRED
        if not isinstance(config.get(key), Mapping)
    ]
    if faults:
        raise ConfigError(faults)


def _settings(config: Config) -> Settings:
    # Any: what a YAML file can hold.
    fields: dict[str, Any] = {key: config.get(key) for key in Settings.__annotations__}
    return Settings(**fields)


def _transforms(config: Config, errors: ErrorCollector) -> dict[str, Transform]:
    """Return the transforms by their keys, in their order."""
    transforms = {}
    for key, fields in (config.get("transform") or {}).items():
        name = f"transform.{key}"
        made = errors.made(name, lambda own=fields: instantiate("transforms", own, Transform))
        if made is not None:
            transforms[key] = made
    return transforms


def _selector(config: Config, errors: ErrorCollector) -> Selector | None:
    selector = errors.made("site", lambda: instantiate("sites", config["site"], Selector))
    if selector is None or not errors.passes("site", lambda: _check_stages(selector)):
        return None
    return selector


def _check_stages(selector: Selector) -> None:
    """Refuse a stage that a selector cannot have."""
    for kind in selector.kinds:
        stages = dict.fromkeys((*kind.stages, *kind.group_stages))
        if kind.stage is not None and kind.stage not in stages:
            text = f"{type(kind).__name__} cannot have stage '{kind.stage}'"
            listed = f"stages it can have: {', '.join(stages)}"
            raise FieldError(kind, [("stage", f"{text}; {listed}")])


def _intervention(
    transforms: Mapping[str, Transform],
    selector: Selector | None,
    trigger: Trigger | None,
    errors: ErrorCollector,
) -> Intervention | None:
    """Return the intervention of the transforms, None if there are none."""
    if not transforms or selector is None:
        return None
    key = f"transform.{next(iter(transforms))}" if len(transforms) == 1 else "transform"
    chain = errors.attempt(key, lambda: Chain(*transforms.values()))
    if chain is None:
        return None
    link_names = _link_names(transforms)
    always = errors.attempt(key, lambda: Intervention(chain, selector, names=link_names))
    if always is None or trigger is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # the one before has warned
        return errors.attempt("when", lambda: replace(always, when=trigger))


def _link_names(transforms: Mapping[str, Transform]) -> tuple[str, ...]:
    """Return the names of all links: one for each transform, several for a chain."""
    return tuple(
        f"{key}.{snake(type(link).__name__)}" if link is not transform else key
        for key, transform in transforms.items()
        for link in links_of(transform)
    )


def _task(
    config: Config, validation: float, errors: ErrorCollector
) -> tuple[Task | None, Data | None]:
    """Return the task and its data, with a share of them for validation."""
    task = errors.made("task", lambda: instantiate("tasks", config["task"], Task))
    data = None if task is None else errors.attempt("task", lambda: _load(config, task))
    if task is None or data is None or not validation:
        return task, data
    return task, errors.attempt("validation", lambda: _set_aside(config, task, validation))


def _load(config: Config, task: Task) -> Data:
    with user_code(config["task"], "load"):
        data = task.load()
    if not isinstance(data, Data):
        raise TypeError(f"load() must return a gradsurg.tasks.base.Data, found {data!r}")
    return data


def _set_aside(config: Config, task: Task, share: float) -> Data:
    with user_code(config["task"], "load_with_validation"):
        return task.load_with_validation(share)


def _content(config: Config, task: Task) -> str:
    """Return the hash of the files that the task reads."""
    with user_code(config["task"], "files"):
        return task.content


def _combining(
    config: Config, task: Task | None, trigger: Trigger | None, errors: ErrorCollector
) -> Intervention | None:
    """Return the intervention of the aggregator, None without one.

    The trigger applies to it only if there is no transform.
    """
    fields = config.get("aggregator") or None
    aggregator = shared = None
    if fields is not None:
        aggregator = errors.made(
            "aggregator", lambda: instantiate("aggregators", fields, Aggregator)
        )
    shared = errors.made("shared", lambda: _shared(config))
    if shared not in (None, SharedParameters()) and not fields:
        warnings.warn("shared: has no effect without an aggregator", SurgeryWarning, stacklevel=2)
    if fields is None or aggregator is None or shared is None:
        return None
    key = str(fields.get("name") or snake(type(aggregator).__name__))
    if task is not None and not isinstance(task, MultiTask):
        multi = [name for name in names("tasks") if issubclass(find("tasks", name), MultiTask)]
        errors.add(
            "aggregator",
            f"{key} makes one gradient of those of several losses, and the task has one; tasks "
            f"with several: {', '.join(multi)}",
        )
    always = errors.attempt("shared", lambda: Intervention(aggregator, at=shared, names=(key,)))
    if always is None or trigger is None or config.get("transform"):
        return always

    def triggered() -> Intervention:
        check_trigger(trigger, key)
        return replace(always, when=trigger)

    return errors.attempt("when", triggered)


def _shared(config: Config) -> SharedParameters:
    fields = config.get("shared") or {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"must be a mapping, as granularity: tensor, found {fields!r}")
    shared = call_with_fields(SharedParameters, (), fields)
    assert isinstance(shared, SharedParameters)
    return shared


def _loggers(config: Config, errors: ErrorCollector) -> tuple[GuardedLogger, ...]:
    loggers = []
    for key, fields in (config.get("logger") or {}).items():
        with errors.at(f"logger.{key}"):
            logger = instantiate("loggers", fields, Logger)
            loggers.append(GuardedLogger(logger, json.dumps([key, fields])))
    return tuple(loggers)


def _model(config: Config, data: Data) -> nn.Module:
    """Create a model; the global generators stay as they are."""
    with random_state.preserved():
        return create_model(config, data)


def _device(name: str) -> torch.device:
    """Return the device, after a tensor has been put on it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a wait, before anything is trained
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"there is no '{name}' here; auto takes what there is") from None
    return device


def _without_links(
    plan: Plan,
    transforms: Mapping[str, Transform],
    trigger: Trigger | None,
    errors: ErrorCollector,
) -> dict[str, Plan]:
    """Return the plans of the chain without each of its links."""
    plans = {}
    for link in transforms:
        rest = {key: transform for key, transform in transforms.items() if key != link}
        fields = {key: plan.config["transform"][key] for key in rest}
        intervention = _intervention(rest, plan.selector, trigger, errors)
        config = {**plan.config, "transform": fields}
        plans[link] = replace(plan, config=config, intervention=intervention)
    return plans


def _check_attribute(settings: Settings, config: Config, errors: ErrorCollector) -> None:
    links = config.get("transform") or {}
    if settings.attribute and len(links) < 2:
        found = ", ".join(links) or "none"
        errors.add(
            "attribute",
            f"needs a chain of two transforms or more to leave one out of, found {found}",
        )
    if settings.attribute and settings.control not in ("none", "plain"):
        errors.add(
            "attribute",
            f"the shorter chains have no {settings.control.replace('_', '-')} control, needs "
            f"control=plain or control=none, found control={settings.control}",
        )


def _check_processes(
    settings: Settings,
    intervention: Intervention | None,
    combining: Intervention | None,
    model: nn.Module | None,
    errors: ErrorCollector,
) -> None:
    """Refuse what several processes do not train as one process does."""
    count = settings.compute.ranks
    found = f"found {count} processes"
    if settings.batch_size % count:
        rule = f"must be a multiple of {count}, the processes that share each batch"
        errors.add("batch_size", f"{rule}, found {settings.batch_size}")
    for key, is_set in (
        ("compile", settings.compile),
        ("precision", settings.precision == "float16"),
        ("update_effect_every", settings.update_effect_every > 0),
    ):
        if is_set:
            errors.add(key, f"needs one process, {found}")
    at = combining.at if combining is not None else None
    if isinstance(at, SharedParameters) and at.engine == "feature" and at.reduce == "mean":
        text = "feature has no mean over processes: needs one process or shared.reduce=local"
        errors.add("shared.engine", f"{text}, {found}")
    if intervention is not None and "examples" in intervention.needs:
        name = "+".join(intervention.names)
        errors.add("transform", f"{name} needs all examples of a batch: one process, {found}")
    if model is not None and (reason := processes.refuse_batch_norm(model)):
        errors.add("model", f"{reason}: needs one process, {found}")


def _check_control(
    settings: Settings,
    intervention: Intervention | None,
    combining: Intervention | None,
    errors: ErrorCollector,
) -> None:
    kind = settings.control
    if combining is not None and kind in ("placebo", "update_norm_matched"):
        errors.add(
            "control",
            f"{kind} is for transforms, and {combining.names[0]} is an aggregator: needs "
            f"control=plain, control=norm_matched or control=none, found control={kind}",
        )
    elif intervention is not None and kind == "update_norm_matched":
        errors.attempt("control", lambda: control_interventions([intervention], kind))
        is_linear = all("linear" in link.properties for link in intervention.links)
        if settings.compute.accumulate > 1 and intervention.stage != "step" and not is_linear:
            errors.add(
                "control",
                f"{kind} transforms the sum of the {settings.compute.accumulate} batches of a step "
                "and the treated arm each of them: needs site.stage=step or accumulate=1",
            )
    weighs = combining is not None and isinstance(combining.aggregator, LossWeighting)
    if combining is not None and weighs and settings.control == "norm_matched":
        errors.add(
            "control",
            f"{combining.names[0]} weighs the losses, and so the gradients of the heads too, which "
            "the norm-matched sum does not, needs control=plain or control=none, found "
            "control=norm_matched",
        )
