"""Where a gradient is met: one kind of site a file."""

from gradsurg.sites._tree import tree

__all__ = ["tree"]
