"""Full backward hooks do not go with other hooks and structures."""

from gradsurg.core.pitfalls.base import Pitfall


class LegacyHooks(Pitfall):
    """A module has backward hooks either of the deprecated kind, or full ones.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_backward_hook(print)
    >>> layer.register_full_backward_hook(print)
    Traceback (most recent call last):
    RuntimeError: Cannot use both regular backward hooks and full backward hooks on a single Module.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html, `register_backward_hook`.
    """

    context, kinds, error = "legacy hooks", "ModuleGradients EveryModule", ValueError
    why = (
        "it had hooks of the deprecated register_backward_hook kind, which PyTorch does not have "
        "beside full ones"
    )
    instead = "Use Outputs or Inputs"


class NestedTensors(Pitfall):
    """A full backward hook finds arguments and outputs that are tensors, and tuples of outputs.

    For tensors in other containers it is not called; for a list of outputs PyTorch warns.

    >>> layer = nn.Identity()
    >>> handle = layer.register_full_backward_hook(lambda *_: print("called"))
    >>> layer([torch.ones(1, requires_grad=True)])[0].backward()  # the hook is not called
    """

    context, kinds = "nested tensors", "ModuleGradients EveryModule"
    why = (
        "a full backward hook gets tensors and tuples of them, and those that need a gradient are "
        "inside {where}"
    )
    instead = "Use Outputs or Inputs"
