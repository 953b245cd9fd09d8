"""Attach interventions to a model, apply their transforms to gradients, tell what did not act."""
