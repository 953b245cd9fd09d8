"""Checkpoints call modules a second time; reentrant ones make the graph in the backward pass."""

from typing import ClassVar
from weakref import ref

from torch import Tensor

from gradsurg.core.pitfalls.accumulation import warn_of_parts
from gradsurg.core.pitfalls.base import (
    AttachmentLike,
    Operation,
    Pitfall,
    SiteHook,
    impossible,
    refused,
    reported,
    warned,
)
from gradsurg.torch_internals import autograd

EXAMINED = 4
"""Gradients of a site in the first step, until it is taken for one in each backward pass."""


class Recomputation(Pitfall):
    """A checkpoint runs forward hooks twice, and compares only the shapes of their results.

    A hook that returns another value at the second call makes gradients wrong without an error.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(lambda *_: print("called"))
    >>> checkpoint(lambda x: layer(x).relu(), torch.ones(1, 1), use_reentrant=False).backward()
    called
    called

    https://docs.pytorch.org/docs/stable/checkpoint.html warns of functions that differ between the
    two calls.
    """

    rows: ClassVar = {
        ("checkpoint", "Activations EveryModule"): refused(
            "it is recomputed by a checkpoint, which must give the same values again: {why}."
        ),
    }


class GraphInBackward(Pitfall):
    """A reentrant checkpoint runs its function without a graph, and again in the backward pass.

    In the forward pass its output has one node. The operations inside get theirs in the backward
    pass, which the checkpoint runs as a backward pass of its own: a weight that several checkpoints
    use has one gradient, and one call of its hook, in each. `torch.autograd.grad` finds no path to
    the parameters, and PyTorch raises an error.

    >>> x = torch.ones(1, requires_grad=True)
    >>> checkpoint(lambda x: x.exp().sin(), x, use_reentrant=True).grad_fn.name()
    'CheckpointFunctionBackward'

    https://docs.pytorch.org/docs/stable/checkpoint.html lists the differences of the two variants.
    """

    rows: ClassVar = {
        ("checkpoint, reentrant", "Uses"): reported(
            "the forward pass makes no graph, and the uses are made in the backward pass. "
            "Use checkpoint(use_reentrant=False)."
        ),
        ("checkpoint, reentrant", "Captured"): impossible(
            "the parameters are hidden from torch.autograd.grad. "
            "Use checkpoint(use_reentrant=False)."
        ),
        (
            "shared weight, reentrant checkpoint",
            "Parameters.backward Parameters.accumulated Inputs.total Uses",
        ): warned(
            "each checkpoint has a graph and a backward pass of its own, and it acts once in each. "
            "Use Parameters with stage='backward_end' or stage='step', Outputs of the module that "
            "made the tensor, or checkpoint(use_reentrant=False)."
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._first_step = -1
        self._roots: dict[tuple[Operation, str], ref[Tensor]] = {}  # of the last pass

    def attached(self, attachment: AttachmentLike) -> None:
        if self._first_step < 0:
            self._first_step = attachment.clock.step

    def first_gradient(self, attachment: AttachmentLike, hook: SiteHook) -> None:
        operation, root = hook.operation, None
        if operation.stage in ("use", "backward", "accumulated"):
            root = autograd.root_of_nested_backward()
        if root is None:
            return
        place = operation, hook.entry.site
        is_linear = "linear" in operation.intervention.operator.properties
        if place in self._roots and self._roots[place]() is root and not is_linear:
            warn_of_parts(attachment, hook, 2, "backward pass, as of reentrant checkpoints,")
        self._roots[place] = ref(root)

    def further_gradient(self, attachment: AttachmentLike, hook: SiteHook, call: int) -> None:
        if call < EXAMINED and attachment.clock.step == self._first_step:
            self.first_gradient(attachment, hook)
