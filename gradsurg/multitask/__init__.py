"""Several losses, one update: backward passes of tasks, aggregation of gradients, conflicts."""
