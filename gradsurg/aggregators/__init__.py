"""What is made of the gradients of several tasks: one gradient, one aggregator a file."""
