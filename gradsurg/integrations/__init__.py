"""Callbacks for trainers of other libraries; each is imported when it is used."""

from importlib import import_module
from types import ModuleType

NAMES = ("lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in NAMES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(NAMES)
