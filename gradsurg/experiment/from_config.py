"""Make the surgery of a composed config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gradsurg.aggregators.base import Aggregator
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment.errors import ErrorCollector, joined, leaves
from gradsurg.experiment.making import make
from gradsurg.multitask.aggregation import check_trigger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import nearest
from gradsurg.plugins.registry import find, is_own, name_of, names, snake
from gradsurg.sites.base import Selector
from gradsurg.tasks.base import MultiTask, Task
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain, links_of
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger
from gradsurg.triggers.steps import Steps

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

Config = Mapping[str, Any]  # Any: what YAML can hold
GROUPS = ("transform", "site", "when", "aggregator")
ITEM = ("transform", "site", "when")
"""The keys of one intervention."""
KEYS = (*GROUPS, "shared", "interventions", "seed")
"""The keys of a surgery; all others of a config are about training.

`interventions` maps names to a transform with its site and perhaps a trigger, for a surgery at
several sites. The command line trains with one site, and refuses the key.
"""
PARAMETERS = {"_target_": "gradsurg.Parameters"}
ALWAYS = {"_target_": "gradsurg.Always"}
OWN_CODE = "is imported and called only with own_code=True"
SEARCH_PATH = "add hydra: {searchpath: [pkg://gradsurg.conf]} to the config of the app"


def from_config(
    config: Config | DictConfig | Sequence[Any] | ListConfig,
    seed: int = 0,
    *,
    own_code: bool = False,
) -> Surgery:
    """Return the surgery of a config that Hydra has composed, or of the same mapping.

    `config` has the keys `transform` and `site`, and perhaps `when`, `aggregator`, `shared` and
    `seed`, as `+transform=clip +site=parameters` gives them. For several sites it is a list of such
    mappings, or has `interventions`, which maps names to them. `seed` is that of the surgery where
    the config has none.

    Only gradsurg's own classes are called, unless `own_code` is true: use it for configs that you
    trust. Raises ConfigError, a ValueError, with a line for each fault.
    """
    from omegaconf import OmegaConf  # which one's own loop does without

    given: Any = config
    if OmegaConf.is_config(config):
        given = OmegaConf.to_container(config, resolve=True)
    if isinstance(given, list | tuple):
        given = {"interventions": [*given]}
    errors = ErrorCollector([*_faults(given, own_code)])
    errors.raise_if_any()
    if "_target_" in (given.get("transform") or {}):
        name = name_of(given["transform"]).rpartition(".")[2]
        given = {**given, "transform": {snake(name): given["transform"]}}
    _, item, combining = interventions_of(given, None, errors)
    items = [*_listed(given, errors), *(one for one in (item, combining) if one is not None)]
    seed = given.get("seed") or seed
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        errors.add("seed", f"must be a whole number >= 0, found {seed!r}")
    errors.raise_if_any()
    return Surgery(*map(_as_in_python, items), seed=seed)


def interventions_of(
    config: Config, task: Task | None, errors: ErrorCollector
) -> tuple[Selector | None, Intervention | None, Intervention | None]:
    """Return the selector, the intervention of the transforms and that of the aggregator, whose
    losses are those of `task`. Faults are added to `errors`.
    """
    transforms = {}
    for key, node in (config.get("transform") or {}).items():
        transforms[key] = errors.made(f"transform.{key}", partial(make, node, Transform))
    selector = errors.made("site", lambda: make(config.get("site") or PARAMETERS, Selector))
    if selector is not None:
        with errors.at("site"):
            _check_stages(selector)
    trigger = errors.made("when", lambda: make(config.get("when") or ALWAYS, Trigger))
    item = None
    if transforms and None not in transforms.values() and selector is not None:
        only = next(iter(transforms)) if len(transforms) == 1 else ""
        with errors.at(joined("transform", only)):
            item = intervention_of(transforms, selector, trigger)
    combining = _combining(config, task, None if transforms else trigger, errors)
    return selector, item, combining


def intervention_of(
    transforms: Mapping[str, Transform], selector: Selector, trigger: Trigger | None
) -> Intervention:
    """Return the intervention of a chain, with a name for each link."""
    link_names = tuple(
        f"{key}.{snake(type(link).__name__)}" if link is not transform else key
        for key, transform in transforms.items()
        for link in links_of(transform)
    )
    return Intervention(Chain(*transforms.values()), selector, trigger or Always(), link_names)


def _listed(config: Config, errors: ErrorCollector) -> list[Intervention]:
    """Return the interventions of a list, or of a mapping, which gives them names."""
    listed, items = config.get("interventions") or {}, []
    pairs = listed.items() if isinstance(listed, Mapping) else enumerate(listed)
    for name, given in pairs:
        key = f"interventions.{name}" if isinstance(listed, Mapping) else str(name)
        if not isinstance(given, Mapping) or not {"transform"} <= given.keys() <= {*ITEM}:
            rule = "must have a transform and perhaps a site and when"
            errors.add(key, f"{rule}, found {given!r}")
            continue
        only = {"when": config.get("when"), **given, "transform": {str(name): given["transform"]}}
        inner = ErrorCollector()
        _, item, _ = interventions_of(only, None, inner)
        own = f"transform.{name}"
        lines = [line.replace(own, "transform", 1) for line in inner.lines]
        errors.lines += [f"{key}.{line}" for line in lines]
        if item is not None:
            items.append(item if isinstance(listed, Mapping) else replace(item, names=()))
    return items


def _as_in_python(item: Intervention) -> Intervention:
    """Return an intervention as it is written by hand: one transform is no chain, and default names
    and triggers are left out.
    """
    if isinstance(item.transform, Chain) and len(item.transform.links) == 1:
        item = replace(item, transform=item.transform.links[0])
    if item.when == Steps():
        item = replace(item, when=Always())
    unnamed = replace(item, names=())
    return unnamed if labels_of(unnamed) == item.names else item


def _check_stages(selector: Selector) -> None:
    """Raise FieldError for a stage that a selector cannot have."""
    for kind in selector.kinds:
        stages = dict.fromkeys((*kind.stages, *kind.group_stages))
        if kind.stage is not None and kind.stage not in stages:
            text = f"{type(kind).__name__} cannot have stage '{kind.stage}'"
            listed = f"stages it can have: {', '.join(stages)}"
            raise FieldError(kind, [("stage", f"{text}; {listed}")])


def _combining(
    config: Config, task: Task | None, trigger: Trigger | None, errors: ErrorCollector
) -> Intervention | None:
    """Return the intervention of the aggregator, None without one."""
    node, options = config.get("aggregator"), config.get("shared") or {}
    shared = errors.made("shared", lambda: call_with_fields(SharedParameters, (), options))
    if not node:
        if shared not in (None, SharedParameters()):
            text = "shared: has no effect without an aggregator"
            warnings.warn(text, SurgeryWarning, stacklevel=2)
        return None
    aggregator = errors.made("aggregator", lambda: make(node, Aggregator))
    if aggregator is None or not isinstance(shared, SharedParameters):
        return None
    key = name_of(node) if is_own(node) else snake(type(aggregator).__name__)
    if task is not None and not isinstance(task, MultiTask):
        multi = [name for name in names("tasks") if issubclass(find("tasks", name), MultiTask)]
        errors.add(
            "aggregator",
            f"{key} makes one gradient of those of several losses, and the task has one; tasks "
            f"with several: {', '.join(multi)}",
        )
    with errors.at("shared"):
        if trigger is not None:
            check_trigger(trigger, key)
        return Intervention(aggregator, shared, trigger or Always(), (key,))
    return None


def _faults(config: object, own_code: bool) -> Iterator[str]:
    """Yield what is wrong with the keys of a surgery's config, before anything is made."""
    if not isinstance(config, Mapping):
        yield f"config: must be a mapping or a list of mappings, found {config!r}"
        return
    for key in config:
        if key not in KEYS:
            yield f"{key}: is not a key of a surgery. {nearest(str(key), [*KEYS])}"
    for key in {*GROUPS, "shared"} & config.keys():
        node = config[key]
        if isinstance(node, str):
            yield f"{key}: must be a mapping, found the text '{node}': {SEARCH_PATH}"
        elif not isinstance(node, Mapping | None):
            yield f"{key}: must be a mapping, found {node!r}"
    listed = config.get("interventions")
    if not isinstance(listed, Mapping | list | None):
        yield f"interventions: must map names to interventions, found {listed!r}"
    if not {"transform", "aggregator", "interventions"} & config.keys():
        yield "config: has no transform, no aggregator and no interventions"
    for place, target in leaves(config):
        key, _, last = place.rpartition(".")
        if last == "_target_" and not own_code and not is_own({"_target_": target}):
            yield f"{key}: {target} {OWN_CODE}"
