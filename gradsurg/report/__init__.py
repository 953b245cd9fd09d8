"""From the files of runs to what a person reads."""
