"""Find plug-in classes by the stem of their files: `norm_rescale.py` has `NormRescale`.

A plug-in is a module with a config of its name: `transforms/norm_rescale.py` and
`conf/transform/norm_rescale.yaml`. Nothing is imported to list the names.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from gradsurg.plugins.messages import nearest

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = path if (path := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""The packaged copy of `conf` of a wheel, else that of the checkout."""

GROUPS = {"transforms": "transform", "sites": "site", "triggers": "when"}
GROUPS |= {"aggregators": "aggregator", "models": "model", "tasks": "task", "loggers": "logger"}
"""Folder of classes: folder of their configs."""


@cache
def names(kind: str) -> list[str]:
    """The stems of the plug-ins in a folder, as `transforms`."""
    modules = {path.stem for path in (PACKAGE / kind).glob("*.py")}
    return sorted(modules & {path.stem for path in (CONFIG_DIR / GROUPS[kind]).glob("*.yaml")})


def find(kind: str, name: str) -> type:
    """Import the class of the file `name` in a folder: `NormRescale` from `norm_rescale.py`.

    Raises LookupError, with the choices and the nearest one, if there is no such file.
    """
    stems = names(kind)
    if name not in stems:
        near = nearest(name, stems, listed_by=f"--list {GROUPS[kind]}")
        raise LookupError(f"there is no '{name}' in {kind}. {near}")
    module = import_module(f"gradsurg.{kind}.{name}")
    spelling = name.replace("_", "")
    for key, value in vars(module).items():
        if key.lower() == spelling and isinstance(value, type):
            return value
    raise LookupError(f"{module.__name__} defines no class spelled like its file")


def check_choice(
    name: str, choices: Sequence[str], refused: Mapping[str, str], library: str
) -> None:
    """Raise if `name` is not in `choices`; `refused` maps refused names to reasons."""
    if name in refused:
        raise ValueError(f"{name} {refused[name]}. {nearest(name, list(choices))}")
    if name not in choices:
        raise LookupError(f"there is no '{name}' in {library}. {nearest(name, list(choices))}")


def snake(name: str) -> str:
    """Convert a class name to a stem: `NormRescale` to `norm_rescale`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
