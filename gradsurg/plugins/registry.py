"""Find plug-in classes by the stem of their file: `norm_rescale.py` has `NormRescale`."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from gradsurg.plugins.messages import nearest

CONTRACTS = ("__init__", "base")


def names(kind: str) -> list[str]:
    """The stems of the files in a folder, as `transforms`, that define a class of their name."""
    folder = Path(__file__).parents[1] / kind
    public = (path for path in folder.glob("[!_]*.py") if path.stem not in CONTRACTS)
    return sorted(path.stem for path in public if defines_its_class(path))


@cache
def defines_its_class(path: Path) -> bool:
    """Return whether a file defines, or names in `__all__`, a class spelled like the file."""
    classes = re.findall(
        r'^(?:class |__all__ = \[")(\w+)', path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return path.stem.replace("_", "") in (name.lower() for name in classes)


def find(kind: str, name: str) -> type:
    """Import the class of the file `name` in a folder: `NormRescale` from `norm_rescale.py`.

    Raises LookupError, with the choices and the nearest one, if there is no such file.
    """
    stems = names(kind)
    if name not in stems:
        raise LookupError(f"there is no '{name}' in {kind}. {nearest(name, stems)}")
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
