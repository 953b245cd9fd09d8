"""What is done to a gradient: one transform a file."""
