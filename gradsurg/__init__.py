"""Operate on the gradients of a live PyTorch model and measure what it does to learning.

`gradsurg.Clip`, `gradsurg.Parameters`, `gradsurg.Steps`, `gradsurg.PCGrad` and the rest are found
by name in the folders `transforms`, `sites`, `triggers` and `aggregators`. `dir(gradsurg)` lists
them; for editors `scripts/stub.py` writes `__init__.pyi`. Modules are imported on first
use, so reading the files of runs needs no torch.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gradsurg.plugins.registry import CALLED, find, names

try:
    __version__ = version("gradsurg")
except PackageNotFoundError:  # imported from a folder, never installed
    __version__ = "0+unknown"

FOLDERS = (*CALLED, "integrations", "packaging", "testing")

HOMES = {
    "Comparison": "comparison",
    "Intervention": "core.intervention",
    "Live": "core.live",
    "SharedParameters": "multitask.shared_parameters",
    "Surgery": "core.surgery",
    "SurgeryWarning": "effects.ledger",
    "Trigger": "triggers.base",
    "check_ranks": "experiment.processes",
    "compare": "comparison",
    "from_config": "experiment.from_config",
    "gpm_basis": "per_example.subspaces",
    "hook": "core.hook",
    "list": "experiment.catalogue",
    "load": "experiment.recipes",
    "load_study": "report",
    "ogd_basis": "per_example.subspaces",
    "outcome": "script.recorder",
    "sequence": "experiment.optimization",
}
"""Where to find public names that are not plug-ins. No module has the name of its object."""


def __getattr__(name: str) -> Any:  # Any: the classes of every folder, found by their file's name
    if name in HOMES:
        return getattr(import_module(f"gradsurg.{HOMES[name]}"), name)
    if name in FOLDERS:
        return import_module(f"gradsurg.{name}")
    spelling = name.lower()
    for kind in CALLED:
        for stem in names(kind):
            if stem.replace("_", "") == spelling:
                found = find(kind, stem)
                if found.__name__ == name:
                    return found
    # With `name` and `obj` Python adds "Did you mean: ...?" to the message.
    said = f"module 'gradsurg' has no attribute '{name}'"
    raise AttributeError(said, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    classes = [find(kind, stem).__name__ for kind in CALLED for stem in names(kind)]
    return sorted([*HOMES, *FOLDERS, *classes, "__version__"])
