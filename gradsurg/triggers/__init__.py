"""When a transform acts: conditions as data, one a file, found by `gradsurg.plugins.registry`."""
