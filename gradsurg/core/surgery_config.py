"""Write a surgery as a plain mapping, of which `gradsurg.from_config` makes an equal one."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from gradsurg.core.intervention import Intervention
from gradsurg.plugins.registry import CALLED, find, names
from gradsurg.sites.combined import Combined
from gradsurg.transforms.base import Function
from gradsurg.transforms.chain import Chain


def config_of(item: Intervention, place: str) -> dict[str, Any]:  # Any: what YAML can hold
    """Return an intervention as an entry of the list `interventions` of a config.

    Raises TypeError for a value that a config cannot hold; `place` is the path of the entry, to
    which the error adds the key.
    """
    kind, site = ("transform", "site") if item.aggregator is None else ("aggregator", "shared")
    parts = {kind: item.transform, site: item.at, "when": item.when}
    config = {key: _node(part, f"{place}.{key}") for key, part in parts.items()}
    if item.aggregator is not None:
        del config[site]["_target_"]  # the key `shared` stands for it
    return config | ({"names": [*item.names]} if item.names else {})


def _node(value: Any, place: str) -> Any:  # Any, twice: a field, and what YAML can hold
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_node(part, f"{place}.{index}") for index, part in enumerate(value)]
        case Mapping():
            return {key: _node(part, f"{place}.{key}") for key, part in value.items()}
        case Function(function=partial(func=func, args=(), keywords=given)):
            inner = {key: _node(part, f"{place}.{key}") for key, part in given.items()}
            return {"_target_": _path(func, place), **inner}
        case Function(function=function):
            return {"_target_": _path(function, place)}
        case Chain(links=links):
            return {"_target_": "gradsurg.Chain", "links": _node(links, f"{place}.links")}
        case Combined(test=test) if test is not None:
            name = getattr(test, "__qualname__", type(test).__qualname__)
            raise TypeError(
                f"{place}: where({name}) is code, which no config holds: select by pattern, types, "
                "depth or index"
            )
    if not is_dataclass(value):
        raise TypeError(f"{place}: no config holds {value!r}")
    inner = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
    inner = {key: _node(part, f"{place}.{key}") for key, part in inner.items()}
    return {"_target_": _path(type(value), place), **inner}


def _path(thing: Any, place: str) -> str:  # Any: a class or a function
    """Return the dotted path from which a class or function can be imported elsewhere."""
    name = getattr(thing, "__name__", "")
    for folder in CALLED:
        for stem in names(folder):
            if stem.replace("_", "") == name.lower() and find(folder, stem) is thing:
                return f"gradsurg.{name}"
    # Functions of PyTorch, as torch.tanh, name a private module or none: `torch` has them.
    for module in (getattr(thing, "__module__", None), torch.__name__):
        is_there = module != "__main__" and getattr(sys.modules.get(module or ""), name, None)
        if is_there is thing:
            return f"{module}.{name}"
    shown = getattr(thing, "__qualname__", "") or repr(thing)
    raise TypeError(
        f"{place}: {shown} cannot be imported elsewhere: define it in a module, outside functions"
    )
