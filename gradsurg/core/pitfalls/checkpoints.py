"""Checkpoints call modules a second time; reentrant ones make the graph in the backward pass."""

from weakref import ref

from torch import Tensor

from gradsurg.core.pitfalls.accumulation import warn_of_parts
from gradsurg.core.pitfalls.base import (
    AttachmentLike,
    Cell,
    Operation,
    Pitfall,
    SiteHook,
)
from gradsurg.torch_internals import autograd

EXAMINED = 4
"""Gradients of a site in the first step, until it is taken for one in each backward pass."""


class SecondCalls(Pitfall):
    """A checkpoint calls its function again in the backward pass, with all forward hooks.

    A checkpoint compares only the shapes of the results: a hook that returns another value at the
    second call makes gradients wrong without an error. A reentrant checkpoint makes no graph in the
    forward pass, so `torch.autograd.grad` finds no path to the parameters. In the backward pass it
    runs a backward pass of its own. A weight that several reentrant checkpoints use has one
    gradient, and one call of its hook, in each of them.

    >>> layer, x = nn.Linear(1, 1), torch.ones(1, 1, requires_grad=True)
    >>> handle = layer.register_forward_hook(lambda *_: print("called"))
    >>> checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False).backward()
    called
    called
    >>> checkpoint(lambda x: x.exp().sin(), x, use_reentrant=True).grad_fn.name()
    'CheckpointFunctionBackward'

    https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    cells = (
        Cell("checkpoint, not repeatable", "Activations EveryModule").refused(
            "a checkpoint computes this tensor again in the backward pass and must get the same "
            "values, but {why}. Do not checkpoint this module."
        ),
        Cell("checkpoint, reentrant", "Uses").reported(
            "a reentrant checkpoint makes its graph in the backward pass. "
            "Use checkpoint(use_reentrant=False)."
        ),
        Cell("checkpoint, reentrant", "Captured").impossible(
            "torch.autograd.grad reaches no parameters there. Use checkpoint(use_reentrant=False)."
        ),
        Cell(
            "shared weight, reentrant checkpoint",
            "Parameters.backward Parameters.accumulated Inputs.total Uses",
        ).warned(
            "the site acts once in each checkpoint, which has a backward pass of its own. Use "
            "Parameters at stage='backward_end' or 'step', or checkpoint(use_reentrant=False)."
        ),
    )

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
            warn_of_parts(attachment, hook, 2, "backward pass, one in each reentrant checkpoint")
        self._roots[place] = ref(root)

    def further_gradient(self, attachment: AttachmentLike, hook: SiteHook, call: int) -> None:
        if call < EXAMINED and attachment.clock.step == self._first_step:
            self.first_gradient(attachment, hook)
