"""Small models to train, one a file."""
