"""The path from a command line to finished runs: configs, plans, training, run folders."""
