"""Unless: fire when another trigger does not. The result of `~a`, defined in `base.py`."""

from gradsurg.triggers.base import Unless

__all__ = ["Unless"]
