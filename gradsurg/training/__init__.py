"""An arm with one seed, from its plan to the files that it leaves."""
