"""Loggers of runs and studies, beside the files of the run directory: one class per module."""
