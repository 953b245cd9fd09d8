"""Saved-tensor hooks do not add up, see no names, and are not differentiated."""

from gradsurg.core.pitfalls.base import Cell, Pitfall


class OnePair(Pitfall):
    """Of nested saved-tensor hooks only the innermost pair is called.

    A hook learns nothing of a tensor but its values, so that all of a block are one site. Inside
    torch.func PyTorch disables such hooks. A gradient is differentiated as if they had changed
    nothing: a penalty on it has a wrong derivative, without an error.

    >>> hooks, x = torch.autograd.graph.saved_tensors_hooks, torch.ones(1, requires_grad=True)
    >>> outer, inner = (hooks(partial(print, name), print) for name in ("outer", "inner"))
    >>> with outer, inner: y = (3 * x).square()
    inner tensor([3.], grad_fn=<MulBackward0>)
    >>> with hooks(lambda saved: saved, lambda saved: saved * 3): y = x**3
    >>> torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True), x)  # of 27 x**2: 54 x
    (tensor([18.]),)

    https://docs.pytorch.org/docs/stable/autograd.html, "Hooks for saved tensors".
    """

    cells = (
        Cell("other saved-tensor hooks", "SavedTensors").refused(
            "the node has saved-tensor hooks, such as a checkpoint's. "
            "Use SavedTensors('<module>') without node=."
        ),
        Cell("stateful transform", "SavedTensors", ValueError).refused(
            "{what} keeps one state for many tensors. "
            "Use SavedTensors('<module>'), with or without node=."
        ),
        Cell("nested modules", "SavedTensors").refused(
            "another intervention selects {outer} around it, and a saved tensor belongs to the "
            "innermost module only. Let both select the same modules."
        ),
        Cell("torch.func", "SavedTensors").refused(
            "PyTorch allows no saved-tensor hooks inside torch.func. Use Activations."
        ),
        Cell("double backward", "SavedTensors").refused(
            "PyTorch cannot differentiate the change of a saved tensor, which create_graph=True "
            "needs. Use Activations, or leave out create_graph=True."
        ),
    )
