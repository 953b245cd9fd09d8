"""Saved-tensor hooks do not add up, see no names, and are not differentiated."""

from gradsurg.core.pitfalls.base import Pitfall


class OnePair(Pitfall):
    """Of nested saved-tensor hooks the innermost pair alone is called.

    >>> hooks, x = torch.autograd.graph.saved_tensors_hooks, torch.ones(1, requires_grad=True)
    >>> outer, inner = (hooks(partial(print, name), print) for name in ("outer", "inner"))
    >>> with outer, inner: y = (3 * x).square()
    inner tensor([3.], grad_fn=<MulBackward0>)

    https://docs.pytorch.org/docs/stable/autograd.html, "Hooks for saved tensors".
    """

    context, kinds = "other saved-tensor hooks", "SavedTensors"
    why = "there are hooks already, as those of a checkpoint, and a node takes one pair alone"
    instead = "Choose the module without node="


class OneSite(OnePair):
    """A hook learns nothing of a tensor but its values, so that all of a block are one site."""

    context, error = "stateful transform", ValueError
    why = "it is many tensors, and {what} remembers one thing for each site"
    instead = "Choose modules or nodes"


class DoubleBackward(Pitfall):
    """PyTorch differentiates a gradient as if saved-tensor hooks had changed nothing.

    A penalty on that gradient has a wrong derivative, without an error.

    >>> x, hooks = torch.ones(1, requires_grad=True), torch.autograd.graph.saved_tensors_hooks
    >>> with hooks(lambda saved: saved, lambda saved: saved * 3): y = x**3
    >>> torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True), x)  # of 27 x**2: 54 x
    (tensor([18.]),)
    """

    context, kinds = "double backward", "SavedTensors"
    why = "it is read back under create_graph, and PyTorch cannot differentiate what is done"
    instead = "Use Activations, or no create_graph"


class InnermostAlone(OnePair):
    """The pair of a module around another one is not called for what the inner one saves."""

    context = "nested modules"
    why = (
        "another intervention selects {outer} around it and not the module itself, and a saved "
        "tensor belongs to the innermost module alone"
    )
    instead = "Let both select the same modules"
