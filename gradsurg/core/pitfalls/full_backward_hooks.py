"""Full backward hooks do not go with other hooks and structures."""

from gradsurg.core.pitfalls.base import FULL_HOOKS, Cell, Pitfall


class FullBackwardHooks(Pitfall):
    """A full backward hook passes the tensors of a call through an `autograd.Function`.

    It finds arguments and outputs that are tensors, and tuples of outputs; for tensors in other
    containers it is not called. It makes inputs and outputs views, which PyTorch protects from
    writes in place. torch.func cannot transform the function. A module has either full hooks or
    hooks of the deprecated `register_backward_hook`.

    >>> layer, x = nn.Identity(), torch.ones(1, requires_grad=True)
    >>> handle = layer.register_full_backward_hook(lambda *_: print("called"))
    >>> layer([x])[0].backward()  # the hook is not called
    >>> layer(x).relu_()
    Traceback (most recent call last):
    RuntimeError: Output 0 of BackwardHookFunctionBackward is a view and is being modified inplace.
    >>> torch.func.grad(layer)(x)
    Traceback (most recent call last):
    RuntimeError: In order to use an autograd.Function with functorch transforms ...
    >>> layer.register_backward_hook(print)
    Traceback (most recent call last):
    RuntimeError: Cannot use both regular backward hooks and full backward hooks on a single Module.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html
    https://docs.pytorch.org/docs/stable/notes/extending.func.html, pytorch#61519
    """

    cells = (
        Cell("legacy hooks", "ModuleGradients EveryModule", ValueError).refused(
            "it has hooks of the deprecated register_backward_hook, beside which PyTorch allows no "
            "full hooks. Use Outputs or Inputs."
        ),
        Cell("nested tensors", "ModuleGradients EveryModule").refused(
            "PyTorch's full backward hooks see no tensors in {where}. Use Outputs or Inputs."
        ),
        Cell("in-place consumer", FULL_HOOKS).refused(
            "PyTorch allows no in-place change of a tensor with a full backward hook. "
            "Use Outputs or Inputs, or inplace=False."
        ),
        Cell("torch.func", FULL_HOOKS).refused(
            "torch.func does not support full backward hooks. Use Outputs or Inputs."
        ),
    )
