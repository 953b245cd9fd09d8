"""Private corners of PyTorch, each behind one function with a test."""
