"""Methods that combine the gradients of several tasks into one, one aggregator a file."""
