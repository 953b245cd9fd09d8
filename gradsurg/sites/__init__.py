"""Hook points: where in a model or an autograd graph a gradient is met; one kind a file."""

from gradsurg.sites.model_tree import tree

__all__ = ["tree"]
