"""Hooks that apply transforms to gradients: checks, state, measuring."""
