"""AllOf: fire when all of several triggers fire. The result of `a & b`, defined in `base.py`."""

from gradsurg.triggers.base import AllOf

__all__ = ["AllOf"]
