"""Data of the tasks: drawing, splitting and standardizing arrays, and reading image files."""
