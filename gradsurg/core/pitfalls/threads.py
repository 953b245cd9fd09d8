"""Modes of PyTorch hold in one thread."""

from gradsurg.core.pitfalls.base import Pitfall


class OtherThread(Pitfall):
    """A mode, as one that sees the calls of functions, holds in the thread that has entered it.

    >>> made = Thread(target=lambda: print(torch.ones(1).device))
    >>> with torch.device("meta"): made.start(); made.join()
    cpu
    """

    context, kinds, outcome = "threads", "Captured", "reported"
    why = "the calls of torch.autograd.grad are seen in the thread of attach alone"
    instead = "Attach in the thread that calls it"
