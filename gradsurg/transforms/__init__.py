"""Transforms: pure maps from a gradient to a gradient, one class a file."""
