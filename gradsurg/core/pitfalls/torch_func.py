"""torch.func differentiates functions of tensors that it makes."""

from gradsurg.core.pitfalls.base import FULL_HOOKS, PARAMETERS, Pitfall


class OtherTensors(Pitfall):
    """`functional_call` computes with the tensors that it is given, not with the parameters.

    >>> layer, given = nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> call = lambda given: torch.func.functional_call(layer, given, torch.ones(1, 1)).sum()
    >>> grads = torch.func.grad(call)(given)  # the hook is not called

    https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html
    """

    context, kinds, outcome = "torch.func", f"{PARAMETERS} Captured", "reported"
    why = "the gradients are of the tensors given to functional_call, not of the parameters"
    instead = "Use Outputs or Inputs"


class NoFullHooks(Pitfall):
    """PyTorch makes full backward hooks by an `autograd.Function` that torch.func cannot transform.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_full_backward_hook(lambda *_: None)
    >>> torch.func.grad(lambda x: layer(x).sum())(torch.ones(1, 1))
    Traceback (most recent call last):
    RuntimeError: In order to use an autograd.Function with functorch transforms ...

    https://docs.pytorch.org/docs/stable/notes/extending.func.html
    """

    context, kinds = "torch.func", FULL_HOOKS
    why = "torch.func has no full backward hooks"
    instead = "Use Outputs or Inputs"


class NoSavedTensorHooks(NoFullHooks):
    """torch.func disables saved-tensor hooks."""

    kinds = "SavedTensors"
    why = "PyTorch has no saved-tensor hooks inside torch.func"
    instead = "Use Activations"
