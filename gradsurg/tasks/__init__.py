"""Tasks: data, a loss and metrics to train on, one task a file."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurg.tasks.base import Classification, Data, MultiTask, Regression, Task

__all__ = ["Classification", "Data", "MultiTask", "Regression", "Task"]


def __getattr__(name: str) -> object:
    """Import what a task needs on first use: fetching data needs no torch."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.base"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
