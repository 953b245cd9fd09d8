"""Gradients of single examples, computed from one backward pass of a batch."""
