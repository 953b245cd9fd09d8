"""Comparison of the working tree with a reference commit of gradsurg; see README.md."""
