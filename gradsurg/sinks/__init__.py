"""Where logged numbers go besides the run directory: one sink a file."""
