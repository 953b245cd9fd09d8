"""No gradient is computed."""

from gradsurg.core.pitfalls.base import FULL_HOOKS, GRADIENTS, PARAMETERS, Pitfall


class NoGradient(Pitfall):
    """A hook is called when its gradient is computed. If none is, PyTorch says nothing.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> handle = weight.register_hook(lambda grad: print("called"))
    >>> with torch.no_grad(): loss = weight.sum()  # has no graph: the hook will not be called

    https://docs.pytorch.org/docs/stable/notes/autograd.html, "Locally disabling gradient
    computation".
    """

    context, outcome = "no_grad", "reported"
    kinds = f"{PARAMETERS} {GRADIENTS} {FULL_HOOKS} SavedTensors"
    why = "no gradient is computed, so nothing passes"
    instead = "Run a backward pass in the block"


class MissingEdge(NoGradient):
    """An edge of a node without a next one belongs to an input that needs no gradient."""

    context, kinds, outcome = "edges of a node", "Nodes.leave", "refused"
    error = LookupError
    why = "it has no such edge that takes a gradient"
    instead = "There are: {edges}"
