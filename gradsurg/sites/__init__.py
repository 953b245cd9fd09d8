"""Hook points: places in a model or autograd graph to hook; one kind per file."""

from gradsurg.core.pitfalls import outcomes
from gradsurg.sites.model_tree import tree

__all__ = ["outcomes", "tree"]
