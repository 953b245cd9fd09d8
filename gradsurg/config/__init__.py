"""From a command line to the objects of an experiment, checked as a whole."""
