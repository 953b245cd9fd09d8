"""From a resolved config, plain dicts and numbers, to the objects of a study."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradsurg.faults import ConfigError, Faults
from gradsurg.fields import nearest
from gradsurg.intervention import Intervention
from gradsurg.make import Config, make
from gradsurg.optimizers import optimizer_maker
from gradsurg.pairs import Pair, Plan
from gradsurg.parts import (
    checked_model,
    device_of,
    model_of,
    names_of,
    sinks_of,
    task_of,
    transforms_of,
)
from gradsurg.probe import culprit, probe
from gradsurg.settings import Settings
from gradsurg.sinks.base import Sink
from gradsurg.sites.base import Selector
from gradsurg.surgery import Surgery
from gradsurg.tasks.base import Data
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Trigger

GROUPS = ("transform", "site", "when", "model", "task", "optimizer", "sink")
REQUIRED = ("site", "when", "model", "task", "optimizer")


@dataclass(frozen=True)
class Experiment:
    """All that a config asks for, checked, before anything is trained."""

    settings: Settings
    pairs: tuple[Pair, ...]
    surgery: Surgery
    make_model: Callable[[], nn.Module]
    example_input: Tensor  # two examples of the task's data
    sinks: tuple[Sink, ...]


def build(config: Config) -> Experiment:
    """Make every object of an experiment. Raises ConfigError with all that is wrong with it."""
    wrong = _wrong_keys(config)
    if wrong:
        raise ConfigError(wrong)
    faults = Faults()
    settings = faults.made("", lambda: _settings(config))
    selector, intervention = _surgery(config, faults)
    shorter = _without_links(config, settings, faults)
    task, data = task_of(config, faults)
    sinks = sinks_of(config, faults)
    make_optimizer = optimizer_maker(config, settings)
    if task is not None and data is not None:
        model = faults.made("model", lambda: checked_model(config, task, data))
        if model is not None:
            faults.made("optimizer", lambda: make_optimizer(model))
            if selector is not None:
                with faults.at(culprit(config["site"])):
                    probe(selector, intervention, model, data)
    device = None
    if settings is not None:
        _check_batch(settings, data, faults)
        device = faults.made("device", lambda: device_of(settings.device))
    faults.stop()
    # What is missing has been said, and `stop` has raised.
    assert settings
    assert task
    assert selector
    assert device
    assert data

    def plan_of(config: Config, intervention: Intervention | None) -> Plan:
        return Plan(config, settings, task, make_optimizer, device, selector, intervention)

    without = {link: plan_of(*parts) for link, parts in shorter.items()}
    plan = replace(plan_of(config, intervention), without=without)
    seeds = [settings.seed] if settings.seed is not None else range(settings.seeds)
    return Experiment(
        settings,
        tuple(plan.pair(seed) for seed in seeds),
        plan.surgery(0),
        lambda: model_of(config, data),
        data.train_inputs[:2],
        sinks,
    )


def _wrong_keys(config: Config) -> list[str]:
    """What stands at the top of the config and means nothing, and what is not there."""
    known = [*GROUPS, *Settings.__annotations__]
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


def _surgery(config: Config, faults: Faults) -> tuple[Selector | None, Intervention | None]:
    """Where gradients are changed or, without a transform, measured; and what is done to them."""
    transforms = transforms_of(config, faults)
    selector = faults.made("site", lambda: make("sites", config["site"], Selector))
    trigger = faults.made("when", lambda: make("triggers", config["when"], Trigger))
    if not transforms or selector is None or trigger is None:
        return selector, None
    key = f"transform.{next(iter(transforms))}" if len(transforms) == 1 else "transform"
    with faults.at(key):
        chain = Chain(*transforms.values())
        intervention = Intervention(chain, selector, trigger, names_of(transforms))
        return selector, intervention
    return selector, None


def _without_links(
    config: Config, settings: Settings | None, faults: Faults
) -> dict[str, tuple[Config, Intervention | None]]:
    """If links are to be left out, the config and the intervention that each leaves behind."""
    if settings is None or not settings.attribute:
        return {}
    links = config.get("transform") or {}
    if len(links) < 2:
        found = ", ".join(links) or "none"
        faults.lines.append(
            f"attribute: needs a chain of two transforms or more to leave one out of, found {found}"
        )
        return {}
    shorter = {}
    for link in links:
        rest = {key: fields for key, fields in links.items() if key != link}
        less = {**config, "transform": rest}
        shorter[link] = less, _surgery(less, faults)[1]
    return shorter


def _check_batch(settings: Settings, data: Data | None, faults: Faults) -> None:
    count = len(data.train_inputs) if data is not None else settings.batch_size
    if settings.batch_size > count:
        faults.lines.append(f"batch_size: must be <= {count} examples, found {settings.batch_size}")
