"""Checkpoints call modules a second time."""

from gradsurg.core.pitfalls.base import Pitfall


class Recomputation(Pitfall):
    """A checkpoint runs forward hooks twice, and compares only the shapes of their results.

    A hook that returns another value at the second call makes gradients wrong without an error.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> handle = model[0].register_forward_hook(lambda *_: print("called"))
    >>> checkpoint(model, torch.ones(1, 1), use_reentrant=False).sum().backward()
    called
    called

    https://docs.pytorch.org/docs/stable/checkpoint.html warns of functions that differ between the
    two calls.
    """

    context, kinds = "checkpoint", "Activations EveryModule"
    why = "it is recomputed by a checkpoint, which must give the same values again: {why}"
