"""What is learnt: data, a loss and its metrics, one task a file."""
