"""Find plug-in classes by the stem of their files: `norm_rescale.py` has `NormRescale`.

A plug-in is a module with a config of its name: `transforms/norm_rescale.py` and
`conf/transform/norm_rescale.yaml`, whose `_target_` is the class. Nothing is imported to list the
names, or to tell which plug-in a `_target_` is.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from gradsurg.plugins.messages import unknown

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = path if (path := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""The copy of `conf` in an installed wheel, or the checkout's."""

GROUPS = {"transforms": "transform", "sites": "site", "triggers": "when"}
GROUPS |= {"aggregators": "aggregator", "models": "model", "tasks": "task", "loggers": "logger"}
"""Folder of classes: folder of their configs."""
CALLED = ("transforms", "sites", "triggers", "aggregators")
"""The folders whose classes are names of `gradsurg` itself, such as `gradsurg.Clip`."""
TORCH_MODULES = ("torch.optim", "torch.optim.lr_scheduler")
SEQUENCE = "gradsurg.sequence"
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_")
"""The keys of a config that are Hydra's: all others are fields."""


@cache
def names(kind: str) -> list[str]:
    """The stems of the plug-ins in a folder such as `transforms`."""
    modules = {path.stem for path in (PACKAGE / kind).glob("*.py")}
    return sorted(modules & {path.stem for path in (CONFIG_DIR / GROUPS[kind]).glob("*.yaml")})


def find(kind: str, name: str) -> type:
    """Import the class of the file `name` in a folder: `NormRescale` from `norm_rescale.py`.

    Raises LookupError, with the choices and the nearest one, if there is no such file.
    """
    stems = names(kind)
    if name not in stems:
        fault = f"there is no '{name}' in {kind}"
        raise LookupError(unknown(fault, name, stems, listed_by=f"--list {GROUPS[kind]}"))
    module = import_module(f"gradsurg.{kind}.{name}")
    for key, value in vars(module).items():
        if _spells(name, key) and isinstance(value, type):
            return value
    raise LookupError(f"{module.__name__} defines no class spelled like its file")


def name_of(fields: Mapping[str, object]) -> str:
    """Return the name of the object that a config describes.

    It is the stem of a plug-in (`clip`), the class of an optimizer or a schedule of PyTorch's
    (`SGD`), or the dotted path of a user's own class.
    """
    target = str(fields.get("_target_") or fields.get("name") or "")
    package, _, last = target.rpartition(".")
    if target == SEQUENCE:
        return "SequentialLR"
    if package in TORCH_MODULES:
        return last
    for folder in CALLED if package == "gradsurg" else GROUPS:
        for stem in names(folder) if package.startswith("gradsurg") else ():
            if package in ("gradsurg", f"gradsurg.{folder}.{stem}") and _spells(stem, last):
                return stem
    return target


def is_own(fields: Mapping[str, object]) -> bool:
    """Return whether a config describes a class of gradsurg or PyTorch, and no code of a user."""
    return name_of(fields) != fields.get("_target_")


def named(config: Any) -> Any:  # Any: what YAML can hold
    """Return a config with the `name` of each plug-in in place of its `_target_`.

    Runs are stored and hashed in this form, so a class can move and keeps its earlier runs.
    """
    if isinstance(config, list):
        return [*map(named, config)]
    if not isinstance(config, Mapping):
        return config
    items = {key: named(item) for key, item in config.items()}
    if "_target_" not in config or not is_own(config):
        return items
    fields = {key: item for key, item in items.items() if key not in HYDRAS}
    return {"name": name_of(config), **fields}


def _spells(stem: str, name: str) -> bool:
    return stem.replace("_", "") == name.lower()


def snake(name: str) -> str:
    """Convert a class name to a stem: `NormRescale` to `norm_rescale`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
