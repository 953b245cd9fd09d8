"""Shared by every plug-in: validated fields, lookup by name, reductions over axes."""
