"""Make the surgery of a composed config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gradsurg
from gradsurg.aggregators.base import Aggregator
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment.errors import ConfigError, ErrorCollector, joined, leaves
from gradsurg.experiment.making import Faults, make
from gradsurg.multitask.aggregation import check_trigger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import unknown
from gradsurg.plugins.registry import CALLED, SEQUENCE, find, is_own, name_of, names, snake
from gradsurg.sites.parameters import Parameters
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import MultiTask, Task
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain, links_of
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

Config = Mapping[str, Any]  # Any: what YAML can hold
GROUPS = ("transform", "site", "when", "aggregator", "shared")
KEYS = (*GROUPS, "interventions", "seed")
"""The keys of a surgery; all others of a config are about training.

`interventions` is a list of transforms or aggregators with their sites and perhaps triggers, or
maps names to them, for a surgery at several sites. The command line trains with one site, and
refuses the key.
"""
ITEM = (*GROUPS, "names")
"""The keys of one intervention in a list."""
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
    `seed`, such as `+transform=clip +site=parameters` gives them. For several sites it is a list of
    such mappings, or has `interventions`, such a list or a mapping with names. In that case `site`,
    `when` and `shared` are the defaults of interventions that do not set them. `seed` is the
    surgery's seed if the config has none.

    Only transforms, sites, triggers and aggregators of gradsurg are called, unless `own_code` is
    true: use it for configs that you trust. Raises ConfigError, a ValueError, with a line for each
    fault.
    """
    given = _plain(config)
    if isinstance(given, list):
        given = {"interventions": given} if given else {}
    faults = [*_faults(given, own_code)]
    errors = ErrorCollector()
    for key, text in (*faults, *_unknown_keys(given)):
        errors.add(key or "config", text)
    if faults:
        errors.raise_if_any()
    items = [*_listed(given, errors)]
    if {"transform", "aggregator"} & given.keys():
        items += _items(given, errors)
    chosen: Any = seed if given.get("seed") is None else given["seed"]
    if not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 0:
        errors.add("seed", f"must be a whole number >= 0, found {chosen!r}")
    errors.raise_if_any()
    return Surgery(*items, seed=chosen)


def interventions_of(
    config: Config, task: Task | None, errors: ErrorCollector
) -> tuple[Selector | None, Intervention | None, Intervention | None]:
    """Return the selector and the interventions of the transforms and of the aggregator.

    The aggregator combines the losses of `task`. Faults are added to `errors`.
    """
    transforms = {}
    for key, node in (config.get("transform") or {}).items():
        transforms[key] = errors.made(joined("transform", key), partial(make, node, Transform))
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
    """Return the intervention of a chain, with a name for each link.

    An intervention of one transform without a key is returned as it is.
    """
    if "" in transforms:
        return Intervention(transforms[""], selector, trigger or Always())
    link_names = tuple(
        f"{key}.{snake(type(link).__name__)}" if link is not transform else key
        for key, transform in transforms.items()
        for link in links_of(transform)
    )
    return Intervention(Chain(*transforms.values()), selector, trigger or Always(), link_names)


def _listed(config: Config, errors: ErrorCollector) -> Iterator[Intervention]:
    """Yield the interventions of a list, or of a mapping, which gives them names."""
    is_named = isinstance(config.get("interventions"), Mapping)
    for name, given in _pairs(config):
        inner = ErrorCollector()
        used = (
            "when",
            "site" if "transform" in given else "",
            "shared" if "aggregator" in given else "",
        )
        common = {key: config[key] for key in used if key in config}
        yield from _items({**common, **given}, inner, name if is_named else "")
        errors.lines += [f"interventions.{name}.{line}" for line in inner.lines]


def _pairs(config: Any) -> list[tuple[str, Any]]:  # Any: what YAML can hold
    """Return the names of interventions, or their numbers in a list, and what is given for each."""
    listed = config.get("interventions") if isinstance(config, Mapping) else None
    if isinstance(listed, list):
        return [(str(index), given) for index, given in enumerate(listed)]
    return [*listed.items()] if isinstance(listed, Mapping) else []


def _items(config: Config, errors: ErrorCollector, name: str = "") -> Iterator[Intervention]:
    """Yield the interventions of one mapping as a user would write them in Python: a single
    transform is not in a chain, and default names are left out.
    """
    node = config.get("transform")
    given = {**config, "transform": {"": node}} if _is_node(node) else config
    selector, item, combining = interventions_of(given, None, errors)
    if combining is not None and item is None and selector not in (None, Parameters()):
        warnings.warn("site: has no effect without a transform", SurgeryWarning, stacklevel=4)
    if item is not None and not _is_node(node) and len(item.links) == 1:
        item = replace(item, transform=item.links[0])
    if combining is not None:
        combining = replace(combining, names=())
    names: Any = config.get("names")
    for each in (item, combining):
        if each is None:
            continue
        with errors.at("names"):
            if names is not None and each is (item or combining):
                yield replace(each, names=(*names,))
                continue
            many = len(each.link_names) > 1
            labels = (*(f"{name}.{one}" if many else name for one in each.link_names),)
            named = replace(each, names=labels) if name else each
            unnamed = replace(each, names=())
            yield unnamed if labels_of(unnamed) == named.names else named


def _check_stages(selector: Selector) -> None:
    """Raise FieldError for a stage that a selector cannot have."""
    for kind in selector.leaves:
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
        text = f"choose task={' or '.join(multi)}: {key} needs several losses, the task has one"
        errors.add("aggregator", text)
    with errors.at("shared"):
        if trigger is not None:
            check_trigger(trigger, key)
        return Intervention(aggregator, shared, trigger or Always(), (key,))
    return None


def _plain(config: Any) -> Any:  # Any: what YAML can hold
    """Return a config as mappings and lists, with its interpolations resolved."""
    from omegaconf import OmegaConf  # not needed by a loop of the user's
    from omegaconf.errors import OmegaConfBaseException

    if OmegaConf.is_config(config):
        try:
            return _plain(OmegaConf.to_container(config, resolve=True))
        except OmegaConfBaseException as error:
            raise ConfigError([f"{error.full_key}: {str(error).splitlines()[0]}"]) from None
    if isinstance(config, Mapping):
        return {str(key): _plain(value) for key, value in config.items()}
    return [*map(_plain, config)] if isinstance(config, list | tuple) else config


def _is_node(node: object) -> bool:
    return isinstance(node, Mapping) and "_target_" in node


def _faults(config: object, own_code: bool) -> Faults:
    """Yield why the objects of a surgery's config cannot be made."""
    yield from _misshaped(config)
    listed = config.get("interventions") if isinstance(config, Mapping) else None
    if not isinstance(listed, Mapping | list | None):
        yield "interventions", f"must be a list, or map names to interventions, found {listed!r}"
    for name, given in _pairs(config):
        yield from ((joined("interventions", name, key), text) for key, text in _misshaped(given))
    for place, value in leaves(config):
        key, _, last = place.rpartition(".")
        if value == "???":
            yield place, "is required"
        elif isinstance(value, str) and "${" in value:
            yield place, f"must be resolved first, found the interpolation '{value}'"
        elif last == "_target_" and not own_code and not _is_plugin(str(value)):
            yield key, f"{value} {OWN_CODE}"


def _misshaped(config: object) -> Faults:
    """Yield what is wrong with the shape of a surgery, or of one of its interventions."""
    if not isinstance(config, Mapping):
        yield "", f"must be a mapping, found {config!r}"
        return
    for key in GROUPS:
        node = config.get(key)
        if isinstance(node, str):
            yield key, f"must be a mapping, found the text '{node}': {SEARCH_PATH}"
        elif not isinstance(node, Mapping | None):
            yield key, f"must be a mapping, found {node!r}"
    labels = config.get("names", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        yield "names", f"must be a list of names, found {labels!r}"
    if not {"transform", "aggregator", "interventions"} & config.keys():
        yield "", f"has no transform, no aggregator and no interventions; found {config!r}"


def _unknown_keys(config: Any) -> Faults:  # Any: what YAML can hold
    for place, given, known in (
        ("", config, KEYS),
        *((f"interventions.{name}", given, ITEM) for name, given in _pairs(config)),
    ):
        for key in given if isinstance(given, Mapping) else ():
            if key not in known:
                fault = f"a surgery has no key '{key}'"
                yield joined(place, key), unknown(fault, str(key), [*known])


def _is_plugin(target: str) -> bool:
    """Whether a `_target_` is a transform, a site, a trigger or an aggregator of gradsurg, or a
    name that gradsurg does not have.
    """
    package, _, name = target.rpartition(".")
    if package == "gradsurg" and not hasattr(gradsurg, name):
        return True
    folders = [f"gradsurg.{folder}" for folder in CALLED]
    is_public = package == "gradsurg" and target != SEQUENCE
    return is_own({"_target_": target}) and (is_public or package.rpartition(".")[0] in folders)
