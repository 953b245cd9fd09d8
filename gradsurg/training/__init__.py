"""Training: the loop, runs with their files and checkpoints, studies, and comparisons."""
