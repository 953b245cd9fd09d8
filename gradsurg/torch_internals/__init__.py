"""Private functions of PyTorch, each behind one function of ours with a test."""
