"""Turn a command line into the objects of an experiment, checked together."""
