"""Operate on the gradients of a live PyTorch model and measure what it does to learning.

`gradsurg.Clip`, `gradsurg.Parameters`, `gradsurg.Steps`, `gradsurg.PCGrad` and the rest are found
by name in the folders `transforms`, `sites`, `triggers` and `aggregators`; `dir(gradsurg)` lists
them. Nothing is imported before it is asked for: what only reads the files of runs works without
torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gradsurg.catalogue import find, names

if TYPE_CHECKING:
    from gradsurg.comparison import Comparison, compare
    from gradsurg.hooking import hook
    from gradsurg.intervention import Intervention
    from gradsurg.ledger import SurgeryWarning
    from gradsurg.live import Live
    from gradsurg.multitask.shared_parameters import SharedParameters
    from gradsurg.surgery import Surgery
    from gradsurg.triggers.base import Trigger

try:
    __version__ = version("gradsurg")
except PackageNotFoundError:  # imported from a folder, never installed
    __version__ = "0+unknown"

KINDS = ("transforms", "sites", "triggers", "aggregators")

HOMES = {
    "Comparison": "comparison",
    "Intervention": "intervention",
    "Live": "live",
    "SharedParameters": "multitask.shared_parameters",
    "Surgery": "surgery",
    "SurgeryWarning": "ledger",
    "Trigger": "triggers.base",
    "compare": "comparison",
    "hook": "hooking",
}
"""The modules of what stands in no catalogue; none of them is named like what it gives."""

__all__ = [
    "Comparison",
    "Intervention",
    "Live",
    "SharedParameters",
    "Surgery",
    "SurgeryWarning",
    "Trigger",
    "compare",
    "hook",
]


def __getattr__(name: str) -> Any:  # Any: the classes of every folder, found by their file's name
    if name in HOMES:
        return getattr(import_module(f"gradsurg.{HOMES[name]}"), name)
    if name in (*KINDS, "testing"):
        return import_module(f"gradsurg.{name}")
    spelling = name.lower()
    for kind in KINDS:
        for stem in names(kind):
            if stem.replace("_", "") == spelling:
                found = find(kind, stem)
                if found.__name__ == name:
                    return found
    raise AttributeError(f"module 'gradsurg' has no attribute '{name}'")


def __dir__() -> list[str]:
    classes = [find(kind, stem).__name__ for kind in KINDS for stem in names(kind)]
    return sorted([*__all__, *classes, "__version__"])
