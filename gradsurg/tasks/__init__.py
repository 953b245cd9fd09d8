"""Tasks: data, a loss and metrics to train on, one task a file."""
