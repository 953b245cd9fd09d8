"""Interventions, and attaching them to a model."""
