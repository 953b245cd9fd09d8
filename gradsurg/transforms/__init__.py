"""Transforms: pure maps from a gradient to a gradient, one class a file."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurg.plugins.fields import validated
    from gradsurg.transforms.base import GroupTransform, Stateless, Transform

__all__ = ["GroupTransform", "Stateless", "Transform", "validated"]


def __getattr__(name: str) -> object:
    """Import what a transform needs on first use: listing the transforms needs no torch."""
    if name in __all__:
        home = "gradsurg.plugins.fields" if name == "validated" else f"{__name__}.base"
        return getattr(import_module(home), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
