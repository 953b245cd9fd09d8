"""Unless: fire when another trigger does not. It is the result of `~`, defined with it."""

from gradsurg.triggers.base import Unless

__all__ = ["Unless"]
