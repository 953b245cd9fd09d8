"""AnyOf: fire when one of several triggers fires. It is the result of `|`, defined with it."""

from gradsurg.triggers.base import AnyOf

__all__ = ["AnyOf"]
