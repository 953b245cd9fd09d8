"""Small models to operate on: one a file."""
