"""Triggers: the conditions under which a transform acts, one class a file."""
