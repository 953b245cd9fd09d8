"""Where a gradient is met: one kind of site a file."""
