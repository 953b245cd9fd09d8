"""Scripted modules run no Python."""

from gradsurg.core.pitfalls.base import MODULES, Pitfall


class Scripted(Pitfall):
    """The calls inside of a scripted module run no hooks that were registered in Python.

    >>> model = torch.jit.script(nn.Sequential(nn.ReLU()))
    >>> handle = model[0].register_forward_hook(lambda *_: print("called"))
    >>> y = model(torch.ones(1))  # the hook is not called

    https://docs.pytorch.org/docs/stable/jit.html
    """

    context, error = "TorchScript", ValueError
    kinds = f"{MODULES} SavedTensors Nodes Uses Captured"
    why = "it is a ScriptModule, which runs no Python hooks"
    instead = (
        "Act at Parameters or Weights, at a module that is not scripted, or call torch.jit.script "
        "after the block"
    )
