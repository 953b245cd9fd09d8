"""AllOf: fire when all of several triggers fire. It is the result of `&`, defined with it."""

from gradsurg.triggers.base import AllOf

__all__ = ["AllOf"]
