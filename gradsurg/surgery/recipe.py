"""Recipes: a surgery as a yaml file that the library and the command line read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import yaml

from gradsurg.aggregators.base import Aggregator
from gradsurg.hooks.intervention import Intervention, labels_of
from gradsurg.plugins.registry import find, names, snake
from gradsurg.sites.base import Selector
from gradsurg.sites.combined import Combined
from gradsurg.transforms.base import Function, Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger

KEYS = ("transform", "site", "when", "aggregator", "shared", "seed")
"""The keys of a recipe; all others of a config are about training."""

KINDS = {
    Transform: "transforms",
    Selector: "sites",
    Trigger: "triggers",
    Aggregator: "aggregators",
}
SHARED_KEYS = ("pattern", "granularity", "engine", "features")
"""Those of `shared` in the default config."""

HEAD = """# @package _global_
# As DIR/experiment/NAME.yaml: python -m gradsurg.run --config-dir DIR experiment=NAME
# In Python: gradsurg.load("DIR/experiment/NAME.yaml")
"""


def recipe(interventions: Sequence[Intervention], seed: int) -> str:
    """Return the recipe of a surgery. Raises ValueError if a part of it has no yaml form."""
    transforms = [item for item in interventions if item.aggregator is None]
    aggregators = [item for item in interventions if item.aggregator is not None]
    if len(transforms) > 1 or len(aggregators) > 1 or not interventions:
        raise ValueError(
            "a recipe has at most one intervention with a transform and one with an aggregator, "
            f"found {len(transforms)} and {len(aggregators)}"
        )
    content: dict[str, object] = {}
    for item in transforms:
        content["transform"] = _transforms(item)
        content["site"] = _plain(item.at, "site")
    if interventions[0].when != Always():
        content["when"] = _plain(interventions[0].when, "when")
    for item in aggregators:
        if transforms and item.when != Always():
            raise ValueError(
                "when: the trigger of a recipe is that of its transform, found one of the "
                f"aggregator too, {item.when!r}"
            )
        content["aggregator"] = _plain(item.transform, "aggregator")
        content["shared"] = _shared(item.at)
    # A group that is chosen in full is not to be merged with the default option.
    replaced = {"transform": [], "site": None, "when": None, "aggregator": None}
    overrides = [{f"override /{key}": replaced[key]} for key in content if key in replaced]
    content = {"defaults": overrides, **content}
    if seed:
        content["seed"] = seed
    return HEAD + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=98)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is no plain word: readers of yaml differ on `1e5`, `yes` or `a: b`."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if re.fullmatch(r"[a-zA-Z_]\w*", text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def _transforms(item: Intervention) -> dict[str, object]:
    """Return the transforms of an intervention by their names.

    Links that are named `lars.add_decayed`, as those of a chain in a config, are put together.
    """
    labels = item.names or labels_of(item)
    if len(set(labels)) < len(labels):
        raise ValueError(f"names: must differ in a recipe, found {', '.join(labels)}")
    chains: list[tuple[str, list[Transform]]] = []
    for label, link in zip(labels, item.links, strict=True):
        key = label.removesuffix(f".{snake(type(link).__name__)}")
        if chains and chains[-1][0] == key:
            chains[-1][1].append(link)
        else:
            chains.append((key if key not in dict(chains) else label, [link]))
    content: dict[str, object] = {}
    for key, links in chains:
        is_link = len(links) == 1 and key in labels
        content[key] = _plain(links[0] if is_link else Chain(*links), f"transform.{key}")
    return content


def _shared(at: Selector) -> dict[str, object]:
    """Return the fields of `SharedParameters`: those of the default config, and changed ones."""
    default = {field.name: getattr(type(at)(), field.name) for field in _fields(at)}
    return {
        key: _plain(getattr(at, key), f"shared.{key}")
        for key in default
        if key in SHARED_KEYS or getattr(at, key) != default[key]
    }


def _plain(thing: object, key: str) -> object:
    """Return a value, or an object of a plug-in with its fields, as yaml can hold it.

    `key` is its place in the recipe. Raises ValueError for anything else.
    """
    match thing:
        case None | bool() | int() | float():
            return thing
        case str():
            if thing == "???" or "${" in thing:
                raise ValueError(f"{key}: '{thing}' has a meaning of its own in a config")
            return thing
        case list() | tuple():
            return [_plain(item, f"{key}.{index}") for index, item in enumerate(thing)]
        case Mapping():
            return {str(name): _plain(item, f"{key}.{name}") for name, item in thing.items()}
        case Chain():
            return {"name": "chain", "links": _plain(thing.links, f"{key}.links")}
        case Function():
            return {"_target_": _path(thing.function, key)}
        case Transform() | Selector() | Trigger() | Aggregator():
            named = _name(thing, key)
        case _:
            found = getattr(thing, "__qualname__", repr(thing))
            raise ValueError(f"{key}: can be no more than numbers, text and lists, found {found}")
    if not is_dataclass(thing):
        raise ValueError(
            f"{key}: {type(thing).__name__} is no dataclass, so its fields are unknown"
        )
    public = [field.name for field in _fields(thing)]
    if isinstance(thing, Combined):  # as in conf/site/combined.yaml
        public = [name for name in public if name not in ("test", "stage") or getattr(thing, name)]
    return {**named, **{name: _plain(getattr(thing, name), f"{key}.{name}") for name in public}}


def _fields(thing: Any) -> list[Field[object]]:  # Any: an instance of a dataclass
    return [field for field in fields(thing) if field.init]


def _name(thing: object, key: str) -> dict[str, str]:
    """Return the `name` of a plug-in of gradsurg's, or the dotted path of another class."""
    cls = type(thing)
    kind = next(folder for base, folder in KINDS.items() if isinstance(thing, base))
    spelling = cls.__name__.lower()
    for stem in names(kind):
        if stem.replace("_", "") == spelling and find(kind, stem) is cls:
            return {"name": stem}
    return {"_target_": _path(cls, key)}


def _path(thing: object, key: str) -> str:
    """Return the dotted path by which a class or a function can be imported again."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = getattr(thing, "__module__", None) or "builtins"
    try:
        same = attrgetter(name)(import_module(module)) is thing
    except (ImportError, AttributeError):
        same = False
    if not same or module == "__main__":
        raise ValueError(
            f"{key}: '{name}' of {module} cannot be imported by another program; a recipe can have "
            "classes and functions at the top of a module of their own"
        )
    return f"{module}.{name}"
