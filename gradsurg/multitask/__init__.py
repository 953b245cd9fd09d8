"""Several losses, one update: the gradients of the tasks, their conflict, what is made of them."""
