"""Operate on one tensor or one node, without a model."""

import warnings
from itertools import count
from types import TracebackType
from typing import Self
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.hooks.controller import HookController
from gradsurg.hooks.session import Session
from gradsurg.hooks.transform_hook import TransformHook
from gradsurg.sites.base import apply_hooks
from gradsurg.surgery.intervention import GradCallable, Intervention, labels_of
from gradsurg.transforms.base import Need, Transform, as_transform
from gradsurg.triggers.always import Always

NOT_HERE: dict[Need, str] = {
    "entering": "the gradient that enters the node which its own leaves; a hook is not told of it",
    "error": "the gradient of what a model returns; a hook is not told of it",
    "product": "what leaves a product for its input; a hook does not know what it is of",
    "value": "the value whose gradient it gets; a node has none",
}
_HOOKS = count()  # tells hooked places apart: two of them draw different noise


class Hooked:
    """One place that is hooked: `remove()` takes the hook off, and so does the end of a `with`
    block, which says so if no gradient has passed by then.
    """

    def __init__(self, handle: RemovableHandle, ledger: Ledger, label: str) -> None:
        self._handle = handle
        self._ledger = ledger
        self._label = label

    def remove(self) -> None:
        """Take the hook off; once is enough."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
        if error is None and not any(entry.calls for entry in self._ledger):
            warnings.warn(
                f"{self._label}: it was hooked, and no gradient passed before the block "
                "ended: the backward has to run inside it, or call remove() after that",
                SurgeryWarning,
                stacklevel=2,
            )


def hook(place: Tensor | Node, transform: Transform | GradCallable) -> Hooked:
    """Put a transform on one tensor's gradient, or on what enters one autograd node.

    The handle's `remove()` takes it off; the handle is also a context manager. No step is counted
    here: `context.step` stays 0; the n-th place hooked in a process draws the n-th noise. Raises
    ValueError for a group transform.
    """
    if not isinstance(place, Tensor | Node):
        raise TypeError(f"place: must be a tensor or a node of the graph, found {place!r}")
    made = as_transform(transform)
    gives: set[Need] = {"value"} if isinstance(place, Tensor) else set()
    if isinstance(made, Transform) and (lacks := sorted(made.needs - gives)):
        raise ValueError(f"{made!r} needs {NOT_HERE[lacks[0]]}")
    intervention = Intervention(made)
    if intervention.operator.scope == "group":
        raise ValueError(f"{transform!r} needs all gradients of a group at once; a hook has one")
    session = Session(Effects(every=0))
    ledger = session.ledger
    operation = HookController(
        session, labels_of(intervention), intervention.operator, Always(), intervention.stage
    )
    if isinstance(place, Tensor):
        gate = TransformHook(operation, ledger.enter("hook", f"tensor{next(_HOOKS)}"), ref(place))
        return Hooked(place.register_hook(gate.hook), ledger, operation.label)
    gates = [
        TransformHook(
            operation, ledger.enter("hook", f"{place.name()}{next(_HOOKS)}.{index}"), None
        ).hook
        for index in range(len(place._input_metadata))
    ]
    handle = place.register_prehook(lambda grads: apply_hooks(gates, grads))
    return Hooked(handle, ledger, operation.label)
