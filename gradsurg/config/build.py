"""From a resolved config, plain dicts and numbers, to the objects of a study."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradsurg.aggregators.base import LossWeighting
from gradsurg.config.faults import ConfigError, Faults
from gradsurg.config.make import Config, called, make
from gradsurg.config.optimizers import optimizer_maker
from gradsurg.config.pairs import Pair, Plan
from gradsurg.config.parts import (
    aggregator_of,
    checked_model,
    content_of,
    device_of,
    loggers_of,
    model_of,
    names_of,
    several_losses,
    task_of,
    transforms_of,
)
from gradsurg.config.probe import Trial, check_stage
from gradsurg.config.rehearsal import (
    check_acting,
    check_batch,
    check_examination,
    check_manner,
    check_optimizer,
    check_until,
    check_untrained,
    check_waiting,
)
from gradsurg.config.settings import Settings
from gradsurg.config.typed import in_typed_words
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.loggers.base import Guarded
from gradsurg.multitask.aggregation import check_trigger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import nearest
from gradsurg.plugins.registry import snake
from gradsurg.sites.base import Selector
from gradsurg.surgery.intervention import Intervention
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, MultiTask, Task
from gradsurg.training.run_directory import RunDirectory
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Trigger

GROUPS = (
    "transform",
    "site",
    "when",
    "aggregator",
    "model",
    "task",
    "optimizer",
    "schedule",
    "logger",
)
MAPPINGS = ("shared",)
REQUIRED = ("site", "when", "model", "task", "optimizer", "schedule")


@dataclass(frozen=True)
class Experiment:
    """All that a config asks for, checked, before anything is trained."""

    settings: Settings
    pairs: tuple[Pair, ...]
    surgery: Surgery
    make_model: Callable[[], nn.Module]
    data: Data
    loggers: tuple[Guarded, ...]

    @property
    def example_input(self) -> Tensor:
        """Two examples of the task's data."""
        return self.data.train_inputs[:2]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to be trained: what was checked then need not be again."""
        if self.settings.force:
            return False
        out = Path(self.settings.out)
        runs = (run for pair in self.pairs for run in pair.runs)
        return all(RunDirectory(run.directory(out)).finished for run in runs)


def build(config: Config) -> Experiment:
    """Make every object of an experiment. Raises ConfigError with all that is wrong with it."""
    wrong = _wrong_keys(config)
    if wrong:
        raise ConfigError(wrong)
    faults = Faults()
    settings = faults.made("", lambda: _settings(config))
    transforms = transforms_of(config, faults)
    selector = faults.made("site", lambda: _selector(config))
    trigger = faults.made("when", lambda: make("triggers", config["when"], Trigger))
    intervention = _intervention(transforms, selector, trigger, faults)
    task, data = task_of(config, faults)
    joint = _joint(config, task, trigger, faults)
    loggers = loggers_of(config, faults)
    content = model = None
    if task is not None and data is not None:
        content = faults.made("task", lambda: content_of(config, task))
        model = faults.made("model", lambda: checked_model(config, task, data))
    device = None
    if settings is not None:
        device = faults.made("device", lambda: device_of(settings.device))
        check_batch(settings, data, faults)
        check_waiting(settings, joint, faults)
        check_manner(settings, selector, intervention, joint, device, faults)
        _check_links(settings, config, faults)
        _check_control(settings, joint, faults)
    experiment = None
    if not faults.lines and settings and task and selector and device and data:
        make_optimizer = optimizer_maker(config, settings)
        parts = task, make_optimizer, device, selector, intervention, joint
        plan = Plan(config, settings, *parts, content=content or "")
        if settings.attribute:
            plan = replace(plan, without=_without_links(plan, transforms, trigger, faults))
        experiment = _experiment(plan, data, loggers)
    if settings is not None and settings.steps == 0:
        check_untrained(config, settings, selector, joint, model, faults)
    elif experiment is None or not experiment.finished:
        check_optimizer(config, settings, model, faults)
        check_examination(config, task, model, data, faults)
        check_until(settings, task, model, data, faults)
        if task and data and model and selector:
            scope = intervention.operator.scope if intervention else "tensor"
            steady = "name" in config["model"] and "name" in config["task"]
            label = "+".join(transforms) or "none"
            trial = Trial(model, task, data, settings, label, scope, steady)
            asked = config.get("transform") or joint
            check_acting(trial, selector, trigger if asked else None, intervention, joint, faults)
    faults.lines = in_typed_words(faults.lines, selector, trigger, transforms)
    faults.stop()
    assert experiment  # what is missing has been said, and `stop` has raised
    return experiment


def _experiment(plan: Plan, data: Data, loggers: tuple[Guarded, ...]) -> Experiment:
    settings = plan.settings
    seeds = [settings.seed] if settings.seed is not None else range(settings.seeds)
    return Experiment(
        settings,
        tuple(plan.pair(seed) for seed in seeds),
        plan.surgery(0),
        lambda: model_of(plan.config, data),
        data,
        loggers,
    )


def _wrong_keys(config: Config) -> list[str]:
    """What stands at the top of the config and means nothing, and what is not there."""
    known = [*GROUPS, *MAPPINGS, *Settings.__annotations__]
    faults = [
        f"{key}: is not a key here. {nearest(key, known)}" for key in config if key not in known
    ]
    return faults + [
        f"{key}: is required, a mapping with a name"
        for key in REQUIRED
        if not isinstance(config.get(key), Mapping)
    ]


def _settings(config: Config) -> Settings:
    given: dict[str, Any] = {key: config.get(key) for key in Settings.__annotations__}
    return Settings(**given)


def _selector(config: Config) -> Selector:
    selector = make("sites", config["site"], Selector)
    check_stage(selector)
    return selector


def _intervention(
    transforms: Mapping[str, Transform],
    selector: Selector | None,
    trigger: Trigger | None,
    faults: Faults,
) -> Intervention | None:
    """What is done to gradients, if anything is; what does not fit is due to transform or when."""
    if not transforms or selector is None:
        return None
    key = f"transform.{next(iter(transforms))}" if len(transforms) == 1 else "transform"
    chain, names = Chain(*transforms.values()), names_of(transforms)
    always = faults.made(key, lambda: Intervention(chain, selector, names=names))
    if always is None or trigger is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SurgeryWarning)  # said of the other one
        return faults.made("when", lambda: replace(always, when=trigger))


def _joint(
    config: Config, task: Task | None, trigger: Trigger | None, faults: Faults
) -> Intervention | None:
    """The aggregator, where one was asked for. `when` is its own if there is no transform."""
    aggregator = aggregator_of(config, faults)
    shared = faults.made("shared", lambda: _shared(config))
    if shared not in (None, SharedParameters()) and not config.get("aggregator"):
        warnings.warn(
            "shared: says where an aggregator acts, and there is none", SurgeryWarning, stacklevel=2
        )
    if aggregator is None or shared is None:
        return None
    key = str(config["aggregator"].get("name") or snake(type(aggregator).__name__))
    with faults.at("aggregator"):
        if task is not None and not isinstance(task, MultiTask):
            raise ValueError(
                f"{key} makes one gradient of those of several losses, and the task has one; tasks "
                f"with several: {', '.join(several_losses())}"
            )
    always = faults.made("shared", lambda: Intervention(aggregator, at=shared, names=(key,)))
    if always is None or trigger is None or config.get("transform"):
        return always
    return faults.made("when", lambda: _hosted(always, trigger, key))


def _hosted(joint: Intervention, trigger: Trigger, key: str) -> Intervention:
    check_trigger(trigger, key)
    return replace(joint, when=trigger)


def _shared(config: Config) -> SharedParameters:
    fields = config.get("shared") or {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"must be a mapping, as granularity: tensor, found {fields!r}")
    made = called(SharedParameters, (), dict(fields))
    assert isinstance(made, SharedParameters)
    return made


def _without_links(
    plan: Plan, transforms: Mapping[str, Transform], trigger: Trigger | None, faults: Faults
) -> dict[str, Plan]:
    """The plans of the chain without each of its links."""
    plans = {}
    for link in transforms:
        rest = {key: made for key, made in transforms.items() if key != link}
        fields = {key: plan.config["transform"][key] for key in rest}
        intervention = _intervention(rest, plan.selector, trigger, faults)
        config = {**plan.config, "transform": fields}
        plans[link] = replace(plan, config=config, intervention=intervention)
    return plans


def _check_links(settings: Settings, config: Config, faults: Faults) -> None:
    links = config.get("transform") or {}
    if settings.attribute and len(links) < 2:
        found = ", ".join(links) or "none"
        faults.lines.append(
            f"attribute: needs a chain of two transforms or more to leave one out of, found {found}"
        )
    if settings.attribute and settings.control == "norm_matched":
        faults.lines.append(
            "attribute: the shorter chains have no norm-matched control, "
            "needs control=plain or control=none, found control=norm_matched"
        )


def _check_control(settings: Settings, joint: Intervention | None, faults: Faults) -> None:
    weighs = joint is not None and isinstance(joint.aggregator, LossWeighting)
    if joint is not None and weighs and settings.control == "norm_matched":
        faults.lines.append(
            f"control: {joint.names[0]} weighs the losses, and so the gradients of the heads too, "
            "which the norm-matched sum does not, needs control=plain or control=none, found "
            "control=norm_matched"
        )
