"""Numbers before and after a transform, and counts of what fired."""
