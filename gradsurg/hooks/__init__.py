"""The one path that applies a transform to a gradient."""
