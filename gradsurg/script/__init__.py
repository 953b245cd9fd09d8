"""Train a user's own script, unchanged, with and without a surgery, and compare."""
