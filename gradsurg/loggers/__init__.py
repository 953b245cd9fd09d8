"""Where logged numbers go besides the run directory: one logger a file."""
