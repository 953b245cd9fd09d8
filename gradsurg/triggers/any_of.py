"""AnyOf: fire when one of several triggers fires. The result of `a | b`, defined in `base.py`."""

from gradsurg.triggers.base import AnyOf

__all__ = ["AnyOf"]
